"""Times the phases of an engine's start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ("PhaseTimer", "Report")

Report = Callable[[str, float | None], None]
"""Called with a phase's name: with None when it begins, and with its seconds when it has ended.

Two threads can call it.
"""


class PhaseTimer:
    """Times parts of the start: `with phase("weights"):`.

    Args:
        report: called at the beginning and at the end of each phase.

    Attributes:
        seconds: seconds of the finished phases, by name.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._report(name, None)
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
        self._report(name, self.seconds[name])
