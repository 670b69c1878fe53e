"""Cores and free memory of the host that this process may use, container limits included."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ("FreeMemory", "available_cores", "free_host_memory")

_CGROUP_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores(*, cgroup_root: Path = _CGROUP_ROOT, membership: Path = _MEMBERSHIP) -> int:
    """CPU cores that this process may use, at least 1.

    The smallest of the cores in the process's affinity mask and the quotas of all enclosing
    cgroups, rounded down.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quotas = (
        _cpu_quota(directory, is_unified=is_unified)
        for directory, is_unified in _enclosing_groups(cgroup_root, membership, "cpu")
    )
    return max(1, min([cores, *(int(quota) for quota in quotas if quota is not None)]))


def _cpu_quota(directory: Path, *, is_unified: bool) -> float | None:
    """The cores that a cgroup may use; None = no limit."""
    try:
        if is_unified:
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text()
            period = (directory / "cpu.cfs_period_us").read_text()
        cores = int(quota) / int(period)  # ValueError for "max", no limit
    except (OSError, ValueError):
        return None
    return None if cores < 0 else cores  # version 1 has -1 for no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """The memory of a device, in bytes."""

    total_bytes: int
    free_bytes: int
    source: str  # where the figure comes from, as text for users


def free_host_memory(
    *,
    cgroup_root: Path = _CGROUP_ROOT,
    membership: Path = _MEMBERSHIP,
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


def _enclosing_groups(root: Path, membership: Path, controller: str) -> list[tuple[Path, bool]]:
    """The cgroups of this process that may limit a resource, from its own to the root.

    Returns:
        For each cgroup: its directory, and whether its hierarchy is the unified one of version 2.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, bool]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        # In a container the path can lead out of `base`, which is then the container's own group.
        parts = [part for part in path.split("/") if part] if ".." not in path.split("/") else []
        found += [
            (base.joinpath(*parts[:depth]), not controllers) for depth in range(len(parts), -1, -1)
        ]
    return found


def _cgroup_limits(root: Path, membership: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use without inactive file cache) of every enclosing cgroup with a limit."""
    unified = ("memory.max", "memory.current", "inactive_file")
    version_one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    entries = (
        _cgroup_limit(directory, *(unified if is_unified else version_one))
        for directory, is_unified in _enclosing_groups(root, membership, "memory")
    )
    return [entry for entry in entries if entry is not None]


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
