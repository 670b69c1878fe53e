"""Finds ranks that hang, from the state of their processes.

In a step the ranks wait for each other in every layer, because they sum values. So a stopped rank
stops all ranks. If no rank uses a processor, waits for a processor or waits for a disk, all ranks
wait for each other for ever. A rank that computes for a long time does not hang in this sense. The
watchdog of the API process (runtime/replicas/watchdog.py) ends such an engine, by the predicted
time of its steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ("Activity", "HangRule", "read_activity")

_STATE, _UTIME, _STIME = 0, 11, 12  # indices of fields in /proc/PID/stat after the name
_LONGEST_TICK_S = 0.5  # a longer tick counts as this long, because this process was suspended
_COMPUTING_SHARE = 0.05  # a rank that only waits uses less than this share of a core
_CLOCK_S = 0.02  # two ticks of the system's clock, the resolution of processor times


class Activity(NamedTuple):
    """The state of a process at one time."""

    is_stopped: bool  # stopped by SIGSTOP
    has_work: bool  # a thread runs, or waits for a processor or a disk
    cpu_s: float  # processor time of all its threads so far


def read_activity(pid: int, ignored_thread: int | None = None) -> Activity | None:
    """The state of a process now; None if it has ended.

    Args:
        pid: the process's id.
        ignored_thread: id of a thread whose state does not count. If `pid` is the calling process,
            this is the calling thread.
    """
    try:
        stat = _stat(Path(f"/proc/{pid}/stat"))
        has_work = any(
            _stat(Path(f"/proc/{pid}/task/{thread}/stat"))[_STATE] in "RD"
            for thread in os.listdir(f"/proc/{pid}/task")
            if int(thread) != ignored_thread
        )
    except (OSError, IndexError):
        return None
    seconds = (int(stat[_UTIME]) + int(stat[_STIME])) / os.sysconf("SC_CLK_TCK")
    return Activity(stat[_STATE] == "T", has_work, seconds)


def _stat(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


class HangRule:
    """Decides whether ranks hang. It has no clock; its caller reports elapsed time.

    Args:
        limit_s: seconds of a step for which a rank may be stopped, or all ranks may do nothing.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._step: int | None = None
        self._stopped_s: dict[int, float] = {}
        self._silent_s = 0.0
        self._silent_cpu_s = 0.0  # processor time of all ranks when the silence began

    def tick(
        self, elapsed_s: float, step: int | None, activities: Mapping[int, Activity]
    ) -> tuple[int | None, str] | None:
        """Count time that has passed.

        Args:
            elapsed_s: seconds since the last tick.
            step: number of the running step; None = no step runs, and ranks wait for the next one.
            activities: the state of each living rank's process, by rank.

        Returns:
            None if no rank hangs. Otherwise the hanging rank, and a text that describes the hang.
            The rank is None if all ranks wait for each other.
        """
        cpu_s = sum(activity.cpu_s for activity in activities.values())
        if step is None or step != self._step:
            self._step, self._stopped_s = step, {}
            self._silent_s, self._silent_cpu_s = 0.0, cpu_s
            return None
        elapsed_s = min(elapsed_s, _LONGEST_TICK_S)
        for rank, activity in activities.items():
            before = self._stopped_s.get(rank, 0.0)
            self._stopped_s[rank] = before + elapsed_s if activity.is_stopped else 0.0
            if self._stopped_s[rank] > self._limit_s:
                return rank, f"it has been stopped for {self._stopped_s[rank]:.1f} s (SIGSTOP)"
        self._silent_s += elapsed_s
        used_s = cpu_s - self._silent_cpu_s
        has_work = any(activity.has_work for activity in activities.values())
        if has_work or used_s > _CLOCK_S + _COMPUTING_SHARE * self._silent_s:
            self._silent_s, self._silent_cpu_s = 0.0, cpu_s
        if self._silent_s > self._limit_s:
            return None, f"no rank has done anything for {self._silent_s:.1f} s"
        return None
