"""Replies that are made while no client waits for them (`background` of `/v1/responses`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Self

from ostinato.api.base.errors import OverloadedError

__all__ = ("BackgroundReplies", "BackgroundReply")

MAX_RUNNING = 1024


class BackgroundReply:
    """One reply in the making.

    Args:
        present: gives the body of the reply as it is now.
        has_stream: whether there are events.

    Attributes:
        present: as given.
        has_stream: as given.
        events: of its stream so far, as they are sent; empty for a reply without a stream.
    """

    def __init__(self, present: Callable[[], bytes], *, has_stream: bool) -> None:
        self.present = present
        self.has_stream = has_stream
        self.events: list[bytes] = []
        self._is_done = False
        self._news = asyncio.Event()

    @classmethod
    def ended(cls, response: bytes, events: Sequence[bytes]) -> Self:
        """One that was stored."""
        reply = cls(lambda: response, has_stream=bool(events))
        reply.events.extend(events)
        reply.end()
        return reply

    def add(self, event: bytes) -> None:
        """Add an event of the stream."""
        self.events.append(event)
        self._wake()

    def end(self) -> None:
        """No event will follow."""
        self._is_done = True
        self._wake()

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events behind the one with that number, those that are to come too."""
        position = after + 1
        while True:
            news = self._news
            while position < len(self.events):
                yield self.events[position]
                position += 1
            if self._is_done:
                return
            await news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class BackgroundReplies:
    """The replies that are in the making, by their ids."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[BackgroundReply, asyncio.Task[None]]] = {}

    def check(self) -> None:
        """Raises OverloadedError when no further reply can be taken."""
        if len(self._running) >= MAX_RUNNING:
            raise OverloadedError(
                f"{len(self._running)} replies are made in the background, which is the most;"
                " wait for one to end",
                code="too_many_requests",
                retry_after_s=5,
            )

    async def start(
        self, reply_id: str, reply: BackgroundReply, work: Coroutine[Any, Any, None]
    ) -> None:
        """Make the reply in a task of its own.

        Args:
            work: it ends when the reply does; cancelling it ends the reply.
        """

        async def run() -> None:
            try:
                await work
            finally:
                self._running.pop(reply_id, None)
                reply.end()

        self._running[reply_id] = reply, asyncio.create_task(run())
        # The task takes its first step: cancelled before that, it would skip its clean-up.
        await asyncio.sleep(0)

    def get(self, reply_id: str) -> BackgroundReply | None:
        """The reply while it is made; None before and after that."""
        found = self._running.get(reply_id)
        return None if found is None else found[0]

    async def cancel(self, reply_id: str) -> None:
        """End a reply and wait for its end; does nothing for one that is not made now."""
        found = self._running.get(reply_id)
        if found is not None:
            found[1].cancel()
            await asyncio.gather(found[1], return_exceptions=True)
