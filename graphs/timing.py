"""Measures how long the device works on each step: CUDA events on a GPU, the clock on a CPU.

The events of a step are read after the device has passed them. No method waits for an event, so
timing does not stop the host, however many steps are in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ("ClockTimer", "CudaTimer", "StepTimer", "TimingEvent", "make_timer")


class StepTimer(Protocol):
    """Sums the device's time between `begin` and `end` of every step, by kind of step."""

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        """Seconds of all finished steps, by the kind given to `begin`."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds of all finished steps."""
        ...

    def begin(self, kind: str = "") -> None:
        """Call before a step's first work is given to the device.

        Args:
            kind: names the sum to which the time is added.
        """
        ...

    def end(self) -> None:
        """Call after a step's last work."""
        ...


class ClockTimer:
    """The timer of devices that run synchronously (CPUs).

    When `end` is called, the step's work is done.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = 0.0
        self._kind = ""
        self.seconds_by_kind: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_kind.values())

    def begin(self, kind: str = "") -> None:
        self._kind = kind
        self._began = self._clock()

    def end(self) -> None:
        sums = self.seconds_by_kind
        sums[self._kind] = sums.get(self._kind, 0.0) + self._clock() - self._began


class TimingEvent(Protocol):
    """The methods of `torch.cuda.Event` that are used."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(
        self, end_event: Any, /
    ) -> float: ...  # milliseconds, to an event of the same class


class CudaTimer:
    """Two events a step on the current stream; an event is reused after it was read."""

    def __init__(self, new_event: Callable[[], TimingEvent]) -> None:
        """
        Args:
            new_event: makes an event with timing enabled.
        """
        self._new_event = new_event
        self._free: list[TimingEvent] = []
        self._pending: deque[tuple[str, TimingEvent, TimingEvent]] = deque()
        self._began: TimingEvent | None = None
        self._kind = ""
        self._sums: dict[str, float] = {}

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        self._read()
        return self._sums

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_kind.values())

    def begin(self, kind: str = "") -> None:
        self._read()
        self._kind = kind
        self._began = self._take()
        self._began.record()

    def end(self) -> None:
        assert self._began is not None, "a step's end without its beginning"
        ended = self._take()
        ended.record()
        self._pending.append((self._kind, self._began, ended))
        self._began = None

    def _take(self) -> TimingEvent:
        return self._free.pop() if self._free else self._new_event()

    def _read(self) -> None:
        """Add up the steps that the device has finished; they finish in order."""
        while self._pending and self._pending[0][2].query():
            kind, began, ended = self._pending.popleft()
            seconds = began.elapsed_time(ended) / 1000
            self._sums[kind] = self._sums.get(kind, 0.0) + seconds
            self._free += (began, ended)


def make_timer(device: torch.device) -> StepTimer:
    """The timer that fits the device."""
    if device.type != "cuda":
        return ClockTimer()
    return CudaTimer(lambda: torch.cuda.Event(enable_timing=True))
