"""Replies that are generated without an open connection (`background` of `/v1/responses`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Self

import msgspec

from ostinato.api.base.errors import OverloadedError

__all__ = ("BackgroundReplies", "BackgroundReply")

MAX_RUNNING = 1024


class BackgroundReply:
    """One unfinished or finished reply.

    Args:
        present: returns the current body of the reply, as JSON or as a struct.
        has_stream: whether the request asked for a stream of events.
        input_items: the input items of the request, as a JSON list.

    Attributes:
        present: the argument `present`.
        has_stream: the argument `has_stream`.
        input_items: the argument `input_items`.
        events: the encoded events of the stream so far; empty for a reply without a stream.
    """

    def __init__(
        self,
        present: Callable[[], bytes | msgspec.Struct],
        *,
        has_stream: bool,
        input_items: bytes = b"[]",
    ) -> None:
        self.present = present
        self.has_stream = has_stream
        self.input_items = input_items
        self.events: list[bytes] = []
        self._is_done = False
        self._changed = asyncio.Event()

    @classmethod
    def ended(cls, response: bytes, events: Sequence[bytes]) -> Self:
        """Make a finished reply from its stored body and events."""
        reply = cls(lambda: response, has_stream=bool(events))
        reply.events.extend(events)
        reply.end()
        return reply

    def add(self, event: bytes) -> None:
        """Add an event of the stream."""
        self.events.append(event)
        self._wake()

    def end(self) -> None:
        """Mark the stream as complete."""
        self._is_done = True
        self._wake()

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events after number `after`, and wait for new ones until the stream ends.

        Args:
            after: number of the last event to leave out; -1 = leave none out.
        """
        position = after + 1
        while True:
            changed = self._changed
            while position < len(self.events):
                yield self.events[position]
                position += 1
            if self._is_done:
                return
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class BackgroundReplies:
    """The unfinished replies, by their ids."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[BackgroundReply, asyncio.Task[None]]] = {}

    def check(self) -> None:
        """Raises OverloadedError if the limit of unfinished replies is reached."""
        if len(self._running) >= MAX_RUNNING:
            raise OverloadedError(
                f"{len(self._running)} replies are being made in the background, which is the"
                " limit; wait for one to end",
                code="too_many_requests",
                retry_after_s=5,
            )

    async def start(
        self, reply_id: str, reply: BackgroundReply, work: Coroutine[Any, Any, None]
    ) -> None:
        """Generate the reply in a task of its own.

        Args:
            reply_id: the id of the reply.
            reply: the reply.
            work: generates the reply. Cancelling it ends the reply.
        """

        async def run() -> None:
            try:
                await work
            finally:
                self._running.pop(reply_id, None)
                reply.end()

        self._running[reply_id] = reply, asyncio.create_task(run())
        # Let the task begin. If it were cancelled before it begins, its clean-up would be skipped.
        await asyncio.sleep(0)

    def get(self, reply_id: str) -> BackgroundReply | None:
        """The unfinished reply with this id, or None."""
        found = self._running.get(reply_id)
        return None if found is None else found[0]

    async def cancel(self, reply_id: str) -> None:
        """Cancel a reply and wait for its end. Does nothing if it is not running."""
        found = self._running.get(reply_id)
        if found is not None:
            found[1].cancel()
            await asyncio.gather(found[1], return_exceptions=True)
