"""Cores and free memory of the host that this process may use, container limits included."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ("FreeMemory", "available_cores", "free_host_memory")

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """CPU cores that this process may use: the smaller of its affinity mask and cgroup quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = _CGROUP_CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, int(quota) // int(period)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """The memory of a device, in bytes."""

    total_bytes: int
    free_bytes: int
    source: str  # where the figure comes from, as text for users


def free_host_memory(
    *,
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> FreeMemory:
    """The memory that this process can still allocate on the host.

    It is the smallest of the system's available memory and the free memory of every enclosing
    cgroup. Inactive pages of the file cache count as free, because the kernel drops them first.
    """
    import psutil  # imported here because the import takes 15 ms

    memory = psutil.virtual_memory()
    best = FreeMemory(
        total_bytes=memory.total, free_bytes=memory.available, source="available to the system"
    )
    for limit, used in _cgroup_limits(cgroup_root, membership):
        if limit - used < best.free_bytes:
            best = FreeMemory(
                total_bytes=min(limit, memory.total),
                free_bytes=max(0, limit - used),
                source="left under the control group's limit",
            )
    return best


def _cgroup_limits(root: Path, membership: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use without inactive file cache) of every enclosing cgroup with a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            base = root
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        directory = base / path.lstrip("/")
        while True:
            if (entry := _cgroup_limit(directory, *files)) is not None:
                found.append(entry)
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent
    return found


def _cgroup_limit(
    directory: Path, limit_file: str, usage_file: str, cache_entry: str
) -> tuple[int, int] | None:
    try:
        limit = int((directory / limit_file).read_text())  # ValueError for "max", no limit
        used = int((directory / usage_file).read_text())
        statistics = dict(
            line.split() for line in (directory / "memory.stat").read_text().splitlines()
        )
    except (OSError, ValueError):
        return None
    return limit, used - int(statistics.get(cache_entry, 0))
