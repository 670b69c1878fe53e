"""Waiting for a condition, in threads and in coroutines, and attempts that may come too late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ("PATIENCE_S", "repeat_if_late", "until", "wait_until")

T = TypeVar("T")

# The seconds that a test waits for an event. This is several times the longest pause of a busy
# machine, and less than the time after which pytest ends the test.
PATIENCE_S = 240
_NOT_TRUE = "the condition did not come true in time"


def wait_until(condition: Callable[[], object], what: str = _NOT_TRUE) -> None:
    """Poll until `condition` is true. Fails with the text `what` after `PATIENCE_S` seconds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


async def until(condition: Callable[[], object], what: str = _NOT_TRUE) -> None:
    """As `wait_until`, while the event loop goes on."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)


def repeat_if_late(attempt: Callable[[], T | None]) -> T:
    """The first result of `attempt` that is not None, of up to twenty.

    An attempt disturbs something while it runs, and checks that it did. After a pause of the test
    process it is too late for that, and then the attempt returns None.
    """
    for _ in range(20):
        if (result := attempt()) is not None:
            return result
    raise AssertionError("each attempt came too late")
