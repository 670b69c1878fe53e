"""`interrupts_later`: a Ctrl-C waits for the end of a block of code, such as an engine's step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

__all__ = ("interrupts_later",)


@contextmanager
def interrupts_later() -> Generator[None]:
    """A context in which a first SIGINT is only noted. It is handled when the context ends.

    A second SIGINT is handled at once. In threads other than the main thread, which get no signals,
    and in programs that ignore SIGINT, nothing is changed.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            handler(number, frame)
        noted.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if noted:
        handler(signal.SIGINT, noted[0])
