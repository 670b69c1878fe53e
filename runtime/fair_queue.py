"""`FairQueue`: an asyncio queue whose reader does not hold up the event loop."""

from __future__ import annotations

import asyncio
from typing import TypeVar

__all__ = ("FairQueue",)

T = TypeVar("T")
_AT_ONCE = 4  # items that are read before other tasks run; they take about a millisecond


class FairQueue(asyncio.Queue[T]):
    """An `asyncio.Queue` that lets other tasks run while it is read.

    `asyncio.Queue.get` does not suspend its caller while the queue has items. So a reader that is
    slower than the writer would never give other tasks a turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_ready = 0  # items since the reader was last suspended

    async def get(self) -> T:
        """Wait for an item and return it. After every few items, let other tasks run first."""
        self._num_ready = 0 if self.empty() else self._num_ready + 1
        if self._num_ready > _AT_ONCE:
            self._num_ready = 1
            await asyncio.sleep(0)
        return await super().get()
