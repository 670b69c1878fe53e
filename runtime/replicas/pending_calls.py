"""Utility calls that wait for the engine's reply.

The engine executes them in runtime/process/utility_calls.py.
"""

from __future__ import annotations

import asyncio
import itertools

from ostinato.runtime.errors import EngineDeadError, InvalidRequestError
from ostinato.runtime.process.ipc import UtilityCall, UtilityName, UtilityReply

__all__ = ("PendingCalls",)


class PendingCalls:
    """Utility calls whose replies have not arrived."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[str]] = {}

    def begin(self, name: UtilityName) -> tuple[UtilityCall, asyncio.Future[str]]:
        """Make a call; returns the message to send, and the future that gets the reply's text."""
        call = UtilityCall(next(self._ids), name)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending[call.call_id] = future
        return call, future

    def finish(self, reply: UtilityReply) -> None:
        """Hand a reply to its caller."""
        future = self._pending.pop(reply.call_id, None)
        if future is None or future.done():  # its caller is gone
            return
        if reply.is_refused:
            future.set_exception(InvalidRequestError(reply.text, code="call_refused", status=409))
        else:
            future.set_result(reply.text)

    def fail(self, reason: str) -> None:
        """End every call with an error, because the engine died."""
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(EngineDeadError(f"the engine ended: {reason}"))
