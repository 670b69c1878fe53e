"""What a measurement is handed besides the configuration: a place for progress, and engines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ostinato.conf.root import EngineConfig

if TYPE_CHECKING:
    from ostinato.runtime.llm import LLM

__all__ = ("BenchContext",)


class BenchContext:
    """One run of `run bench`."""

    def show(self, text: str) -> None:
        """What is being done, on standard error when that is a terminal; empty = nothing."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def open_llm(self, config: EngineConfig) -> LLM:
        """An engine in this process.

        Raises:
            StartupError: it can not start.
        """
        from ostinato.runtime.llm import LLM

        return LLM(config=config)
