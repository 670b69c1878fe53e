"""Percentiles of TTFT and ITL over the last ten seconds, for the live view of the web page."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

import msgspec

__all__ = ("Percentiles", "RecentLatency")

_WATCH_S = 10.0  # values are collected for this long after a snapshot
_WINDOW_S = 10.0
_MAX_VALUES = 4096


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in seconds, with linear interpolation, as `numpy.percentile` computes them."""

    count: int
    p50: float
    p90: float
    p99: float


class RecentLatency:
    """Times to first token and times between tokens of the last ten seconds, at most 4096 of each.

    A call of `snapshot` starts the collection. The collection stops ten seconds after the last
    call, so a server whose page is not open collects nothing.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0
        self._values: dict[str, deque[tuple[float, float]]] = {
            name: deque(maxlen=_MAX_VALUES) for name in ("ttft", "itl")
        }

    def add(self, name: str, seconds: float) -> None:
        """Record a value of `ttft` or `itl`. Does nothing while the collection is off."""
        now = self._clock()
        if now < self._until:
            self._values[name].append((now, seconds))

    def snapshot(self) -> dict[str, Percentiles | None]:
        """The percentiles by name; None = no values. The collection goes on for ten seconds."""
        now = self._clock()
        if now >= self._until:
            for values in self._values.values():
                values.clear()
        self._until = now + _WATCH_S
        return {name: _percentiles(values, now) for name, values in self._values.items()}


def _percentiles(values: deque[tuple[float, float]], now: float) -> Percentiles | None:
    while values and values[0][0] < now - _WINDOW_S:
        values.popleft()
    seconds = [value for _, value in values]
    if not seconds:
        return None
    # `quantiles` needs two values. Cut point i of 99 is the percentile i + 1.
    cuts = statistics.quantiles(
        seconds * 2 if len(seconds) == 1 else seconds, n=100, method="inclusive"
    )
    return Percentiles(len(seconds), cuts[49], cuts[89], cuts[98])
