"""`EarlyEngine`: an engine process that is started before its configuration is known.

It imports torch while this process reads the configuration. A start of the server has two
processes, so both cores of a small machine are busy from the beginning. This module imports little.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Self

from ostinato.runtime.early_start.child_process import ChildProcess

__all__ = ("EarlyEngine",)

_MODULE = "ostinato.runtime.process.engine_main"


class EarlyEngine:
    """Starts an engine process, and ends it at the end of a `with` block if it was not taken."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None
        # If the system cannot start it now, the later start reports that.
        with contextlib.suppress(OSError):
            self._process = ChildProcess([sys.executable, "-m", _MODULE])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def take(self) -> ChildProcess | None:
        """Hand over the process, which the caller must end; None if it was taken or has ended."""
        process, self._process = self._process, None
        if process is not None and process.has_ended():
            return None
        return process

    def close(self) -> None:
        """End the process, unless it was taken. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.end()
