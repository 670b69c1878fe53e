"""The hang watchdog: for how long an engine has made no progress, and how much of that is expected.

It has no clock and sends nothing: its caller reports messages and elapsed time.

Time counts only while the caller runs. While the machine is suspended or the caller's process is
stopped, no message can arrive. Time in which the engine's process computes counts less: on shared
cores a step may take many times its prediction, whereas a process that hangs on a lock or is
stopped uses no processor time.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("TICK_S", "HangLimits", "Watchdog")

TICK_S = 0.25  # the caller ticks about this often
_LONGEST_TICK_S = 1.0  # a longer tick counts as this long: the caller was suspended
# Predictions are medians of a machine without other work. On shared cores a step takes several
# times as long. An engine that hangs is still noticed, only later.
_MARGIN = 5.0
_COMPUTING_SHARE = 0.05  # share of one core; a process that used more in a tick was computing


class HangLimits(NamedTuple):
    """For how many seconds an engine may be silent; None = for ever."""

    overdue_s: float | None  # server.hang_timeout_s, beyond the predicted time of its steps
    stopped_s: float | None  # parallel.rank_timeout_s, for an engine of several ranks


class Watchdog:
    """Measures the silence of one engine process, in seconds."""

    def __init__(self) -> None:
        self._num_steps: int = 0
        self._stalled_s = 0.0
        self._counted_s = 0.0  # the same with a lower weight for time in which the engine computed
        self._announced_s = 0.0  # prediction of the longest step begun since the last progress
        self._under_way_s = 0.0  # prediction of a step begun before that; it may still run
        self._stopped_s = 0.0

    @property
    def seconds_stalled(self) -> float:
        """Seconds since the engine completed a step or, without work, sent a heartbeat."""
        return self._stalled_s

    @property
    def seconds_overdue(self) -> float:
        """The part of `seconds_stalled` that the announced steps do not explain.

        A second in which the engine computed counts as a fifth: an endless loop is noticed later.
        """
        expected_s = max(self._announced_s, self._under_way_s)
        return max(0.0, self._counted_s - _MARGIN * expected_s)

    def why_killed(self, limits: HangLimits) -> str | None:
        """Why the process must be killed; None = it need not be."""
        if limits.stopped_s is not None and self._stopped_s > limits.stopped_s:
            return (
                f"it has been stopped for {self._stopped_s:.1f} s (SIGSTOP) and was killed, by "
                f"parallel.rank_timeout_s={limits.stopped_s:g}"
            )
        if limits.overdue_s is not None and self.seconds_overdue > limits.overdue_s:
            return (
                f"it completed no step for {self.seconds_stalled:.0f} s and was killed, by "
                f"server.hang_timeout_s={limits.overdue_s:g}"
            )
        return None

    def tick(self, elapsed_s: float, cpu_s: float, *, is_stopped: bool = False) -> None:
        """Count time that has passed without a message.

        Args:
            elapsed_s: seconds since the last tick.
            cpu_s: seconds of processor time that the engine's process used meanwhile.
            is_stopped: the process is stopped (SIGSTOP), and it has work.
        """
        seconds = min(elapsed_s, _LONGEST_TICK_S)
        self._stopped_s = self._stopped_s + seconds if is_stopped else 0.0
        self._stalled_s += seconds
        computes = cpu_s >= _COMPUTING_SHARE * elapsed_s
        self._counted_s += seconds / _MARGIN if computes else seconds

    def on_step_started(self, seconds: float) -> None:
        """Note that the engine begins a step with this predicted duration."""
        self._announced_s = max(self._announced_s, seconds)

    def on_message(self, num_steps: int | None, *, has_outputs: bool, has_work: bool) -> None:
        """Note that the engine sent outputs or a heartbeat.

        Args:
            num_steps: steps that the engine has completed; None = the message does not say.
            has_outputs: whether requests advanced.
            has_work: whether the engine has requests. Without any, each message is progress.
        """
        moved = False
        if num_steps is not None:
            moved, self._num_steps = num_steps != self._num_steps, num_steps
        if moved or has_outputs or not has_work:
            self._stalled_s = self._counted_s = 0.0
            self._under_way_s, self._announced_s = self._announced_s, 0.0
