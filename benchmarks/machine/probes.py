"""The machine's state: memory bandwidth, other programs' load, peak memory, basic conditions.

The speed of a shared machine changes within seconds. So a decode rate is reported with the memory
bandwidth measured just before.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil
import pynvml
import torch

import ostinato
from ostinato.runtime.machine_info import cpu_name, package_versions

__all__ = (
    "EnergyMeter",
    "LoadMeter",
    "PeakMemory",
    "basic_conditions",
    "commit_of",
    "cpu_seconds",
    "read_bandwidth",
)

PROBE_BYTES = 256 << 20
_PROBE_READS = 3
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def read_bandwidth(device: torch.device) -> float:
    """GB/s at which `device` reads 256 MiB, best of three; on a CPU with torch's threads."""
    data = torch.ones(PROBE_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(_PROBE_READS):
        begin = time.perf_counter()
        data.sum().item()  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return PROBE_BYTES / best / 1e9


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time, user and system, that a process and its child processes have used so far.

    Children that have ended count if their parent has read their exit status.
    """
    seconds = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            used = each.cpu_times()
            seconds += used.user + used.system + used.children_user + used.children_system
    return seconds


class LoadMeter:
    """The share of all cores that other programs used between `start` and `stop`, in [0, 1].

    Child processes of this process, and their children, do not count as other programs. The
    exception is a child that ends between `start` and `stop`, if its parent does not read its exit
    status.
    """

    def __init__(self) -> None:
        self._cores = psutil.cpu_count() or 1
        self._process = psutil.Process()
        self.start()

    def start(self) -> Self:
        self._began, self._busy, self._own = self._now()
        return self

    def stop(self) -> float:
        now, busy, own = self._now()
        others = (busy - self._busy) - (own - self._own)
        return min(1.0, max(0.0, others / max(now - self._began, 1e-3) / self._cores))

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
        # Linux counts the time of a virtual machine's guest twice: as `guest` and in `user`.
        busy -= getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return time.perf_counter(), busy, cpu_seconds(self._process)


class EnergyMeter:
    """Joules that all GPUs together use between `start` and `stop`, by NVML's own counters."""

    def __init__(self) -> None:
        self._began: float | None = None

    def start(self) -> None:
        self._began = self._joules()

    def stop(self) -> float | None:
        """Joules since `start`; None without a GPU, or if a GPU does not count energy."""
        now = self._joules()
        return None if now is None or self._began is None else now - self._began

    @staticmethod
    def _joules() -> float | None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        try:
            handles = [
                pynvml.nvmlDeviceGetHandleByIndex(index)
                for index in range(pynvml.nvmlDeviceGetCount())
            ]
            millijoules = [pynvml.nvmlDeviceGetTotalEnergyConsumption(each) for each in handles]
            return sum(millijoules) / 1000 if millijoules else None
        except pynvml.NVMLError:
            return None
        finally:
            pynvml.nvmlShutdown()


@dataclass(slots=True)
class PeakMemory:
    """This process's peak resident memory, without the memory of the probes if possible."""

    _peak: int = 0
    forgets: bool = True  # False = the kernel's peak could not be reset and includes the probes

    def note(self) -> None:
        """Take the peak so far into account; called before a probe."""
        self._peak = max(self._peak, self._kernel_peak())

    def forget_probe(self) -> None:
        """Reset the kernel's peak; called after a probe has freed its memory."""
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            self.forgets = False

    @property
    def mib(self) -> float:
        """Peak memory in MiB."""
        self.note()
        return self._peak / (1 << 20)

    @staticmethod
    def _kernel_peak() -> int:
        try:
            lines = _STATUS.read_text().splitlines()
            entry = next(line for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            return psutil.Process().memory_info().rss
        return int(entry.split()[1]) << 10


def basic_conditions() -> dict[str, Any]:
    """The conditions of any measurement: the time, this project's commit, processor, versions."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(Path(ostinato.__file__).parent),
        "cpu": cpu_name(),
        "versions": package_versions(),
    }


def commit_of(directory: Path) -> str | None:
    """The git commit of `directory`, with "-dirty" if there are changes; None without git."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
