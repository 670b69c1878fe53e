"""A clock that moves only when a test moves it, for the code that makes grammar masks."""

from __future__ import annotations

import pytest

from ostinato.runtime.sampling import grammar_masks, grammar_rows

__all__ = ("MaskClock",)


class MaskClock:
    """Stands in for the module `time` where masks are made.

    The time that the masks take decides which rows wait. With this clock the decision does not
    depend on the machine.

    Attributes:
        seconds: what `perf_counter`, `process_time` and `thread_time` return.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        for module in (grammar_masks, grammar_rows):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return self.seconds

    process_time = thread_time = perf_counter
