"""The hang watchdog: measures how long an engine makes no progress, and says when to kill it.

It has no clock and sends nothing. Its caller reports messages and elapsed time.

Time counts only while the caller runs. While the machine is suspended or the caller's process is
stopped, no message can arrive.

Time in which the engine's process computes counts less than other time, because on shared cores a
step can take many times its prediction. A process that hangs on a lock, or is stopped, uses no
processor time, so its time counts in full.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("TICK_S", "HangLimits", "Watchdog")

TICK_S = 0.25  # about the seconds between two calls of `Watchdog.tick`
_LONGEST_TICK_S = 1.0  # a longer tick counts as this long, because the caller was suspended
# Predictions are medians from a machine without other work. On shared cores, a step takes several
# times as long. So predictions are multiplied by this factor.
_MARGIN = 5.0
_COMPUTING_SHARE = 0.05  # a process that used more than this share of a core in a tick computes


class HangLimits(NamedTuple):
    """How many seconds an engine may be silent; None = no limit."""

    # server.hang_timeout_s. A step may take `_MARGIN` times its predicted seconds in addition.
    overdue_s: float | None
    stopped_s: float | None  # parallel.rank_timeout_s; only for an engine of several ranks


class Watchdog:
    """Measures the silence of one engine process, in seconds."""

    def __init__(self) -> None:
        self._num_steps: int = 0
        self._stalled_s = 0.0
        self._counted_s = 0.0  # like _stalled_s, but time of computing has a lower weight
        # Predicted seconds of the longest step that has begun since the last progress.
        self._announced_s = 0.0
        # Predicted seconds of a step that began before the last progress. It can still be running.
        self._under_way_s = 0.0
        self._stopped_s = 0.0

    @property
    def seconds_stalled(self) -> float:
        """Seconds since the engine completed a step or, without work, sent a heartbeat."""
        return self._stalled_s

    @property
    def seconds_overdue(self) -> float:
        """Seconds of silence beyond five times the predicted duration of the announced steps.

        A second in which the engine computed counts as a fifth of a second.
        """
        expected_s = max(self._announced_s, self._under_way_s)
        return max(0.0, self._counted_s - _MARGIN * expected_s)

    def why_killed(self, limits: HangLimits) -> str | None:
        """Why the process must be killed; None = it must not be killed."""
        if limits.stopped_s is not None and self._stopped_s > limits.stopped_s:
            return (
                f"it has been stopped for {self._stopped_s:.1f} s (SIGSTOP) and was killed "
                f"because of parallel.rank_timeout_s={limits.stopped_s:g}"
            )
        if limits.overdue_s is not None and self.seconds_overdue > limits.overdue_s:
            return (
                f"it completed no step for {self.seconds_stalled:.0f} s and was killed because of "
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
