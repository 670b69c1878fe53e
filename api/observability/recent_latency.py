"""Latencies of the last moments, kept only while somebody looks at them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

__all__ = ("Percentiles", "RecentLatency")

_WATCH_S = 10.0  # how long one look keeps the window going
_WINDOW_S = 10.0
_MAX_VALUES = 4096


class Percentiles(msgspec.Struct, frozen=True):
    """Of the values in a window."""

    count: int
    p50: float
    p90: float
    p99: float


class RecentLatency:
    """The last ten seconds' times to first token and between tokens.

    Nothing is kept until `snapshot` is called, and nothing ten seconds after the last call.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0
        self._values: dict[str, deque[tuple[float, float]]] = {
            name: deque(maxlen=_MAX_VALUES) for name in ("ttft", "itl")
        }

    def add(self, name: str, seconds: float) -> None:
        """Keep a value of `ttft` or `itl`, if somebody looks."""
        now = self._clock()
        if now < self._until:
            self._values[name].append((now, seconds))

    def snapshot(self) -> dict[str, Percentiles | None]:
        """What there is in the window, and keep it going."""
        now = self._clock()
        if now >= self._until:
            for values in self._values.values():
                values.clear()
        self._until = now + _WATCH_S
        return {name: _percentiles(values, now) for name, values in self._values.items()}


def _percentiles(values: deque[tuple[float, float]], now: float) -> Percentiles | None:
    while values and values[0][0] < now - _WINDOW_S:
        values.popleft()
    if not values:
        return None
    ordered = sorted(value for _, value in values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Percentiles(len(ordered), at(0.5), at(0.9), at(0.99))
