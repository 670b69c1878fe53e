"""How long an engine has made no progress, and how much of that a long step explains. Pure: the
caller reports what it hears and that time passes.

Time counts only as the caller lives through it: after the whole machine was suspended, or this
process could not run, an engine is not blamed for a silence that nobody could have ended. And time
in which the engine's process computes counts less: on cores that it shares a step may take many
times what it should, while a process that is stopped, or waits for something, uses none.
"""

from __future__ import annotations

__all__ = ("TICK_S", "Watch")

TICK_S = 0.25  # the caller ticks about this often
_LONGEST_TICK_S = 1.0  # of a tick that came late, the rest is not counted
# Predictions are medians of a machine without other work. One is exceeded several times over when
# the cores are shared; no frozen engine escapes by that, it is noticed later.
_MARGIN = 5.0
_COMPUTING_SHARE = 0.05  # of one core, over a tick: from there on a process computes


class Watch:
    """Silence of one engine, in seconds."""

    def __init__(self) -> None:
        self._num_steps: int = 0
        self._silence_s = 0.0
        self._counted_s = 0.0  # of the silence, by what the engine was seen to do in it
        self._announced_s = 0.0  # by steps that began since the last progress
        self._under_way_s = 0.0  # by those before, of which one may still be under way

    @property
    def silence_s(self) -> float:
        """Since the engine completed a step or, without work, gave its last beat."""
        return self._silence_s

    @property
    def overdue_s(self) -> float:
        """Of that silence, what the steps that it announced do not explain.

        A second in which it computed is a fifth of one: an endless loop is noticed too, but later.
        """
        expected_s = max(self._announced_s, self._under_way_s)
        return max(0.0, self._counted_s - _MARGIN * expected_s)

    def tick(self, elapsed_s: float, cpu_s: float) -> None:
        """Time has passed without news, of which the engine's process had so much on the cores."""
        seconds = min(elapsed_s, _LONGEST_TICK_S)
        self._silence_s += seconds
        computes = cpu_s >= _COMPUTING_SHARE * elapsed_s
        self._counted_s += seconds / _MARGIN if computes else seconds

    def step_begins(self, seconds: float) -> None:
        """The engine begins a step that should take that long."""
        self._announced_s = max(self._announced_s, seconds)

    def heard(self, num_steps: int | None, *, has_outputs: bool, has_work: bool) -> None:
        """The engine sent news.

        Args:
            num_steps: that it has completed, when the news say so.
            has_outputs: whether there are tokens among them.
            has_work: whether it has requests; without any, every sign of life is progress.
        """
        moved = False
        if num_steps is not None:
            moved, self._num_steps = num_steps != self._num_steps, num_steps
        if moved or has_outputs or not has_work:
            self._silence_s = self._counted_s = 0.0
            self._under_way_s, self._announced_s = self._announced_s, 0.0
