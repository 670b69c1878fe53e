"""`EngineCalls`: questions to the engine of one replica, which wait for the engine's replies.

The engine executes utility calls in runtime/process/utility_calls.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.errors import EngineDeadError, InvalidRequestError
from ostinato.runtime.process.ipc import (
    ClientMessage,
    GetState,
    LoadAdapter,
    State,
    UtilityCall,
    UtilityName,
    UtilityReply,
)
from ostinato.runtime.replicas.inspection import Inspector
from ostinato.runtime.types.adapters import ServedAdapter

__all__ = ("EngineCalls",)


class EngineCalls:
    """Calls of a replica whose replies have not arrived.

    Args:
        send: sends a message to the engine.
        check_alive: raises EngineDeadError if the engine does not serve.
    """

    def __init__(
        self,
        send: Callable[[ClientMessage], Awaitable[None]],
        check_alive: Callable[[], None],
    ) -> None:
        self._send = send
        self._check_alive = check_alive
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[str]] = {}
        self._inspector = Inspector(lambda: send(GetState()))

    async def utility(self, name: UtilityName) -> str:
        """Have the engine execute a utility call between two steps; returns its answer.

        Raises:
            InvalidRequestError: the engine refuses the call.
            EngineDeadError: the engine does not run.
        """
        self._check_alive()
        call_id, reply = self._begin()
        await self._send(UtilityCall(call_id, name))
        return await reply

    async def begin_load(self, adapter: ServedAdapter) -> asyncio.Future[str]:
        """Ask the engine to load an adapter into its slot.

        Returns:
            Done when the load has ended. Its errors are InvalidRequestError, if the engine cannot
            load the adapter, and EngineDeadError, if the engine ends before.
        """
        call_id, reply = self._begin()
        await self._send(LoadAdapter(call_id, adapter.slot, adapter.path, adapter.digest))
        return reply

    async def inspect(self, timeout_s: float) -> EngineState:
        """The engine's state. Concurrent callers share one answer.

        Raises:
            TimeoutError: no answer within `timeout_s`: a long step runs, or the engine hangs.
            EngineDeadError: the engine does not run.
        """
        self._check_alive()
        return await self._inspector.ask(timeout_s)

    def answer(self, message: UtilityReply | State) -> None:
        """Hand a message of the engine to its caller."""
        if isinstance(message, State):
            self._inspector.answer(message.state)
            return
        future = self._pending.pop(message.call_id, None)
        if future is None or future.done():  # its caller is gone
            return
        if message.is_refused:
            future.set_exception(InvalidRequestError(message.text, code="call_refused", status=409))
        else:
            future.set_result(message.text)

    def fail(self, reason: str) -> None:
        """End every call with an error, because the engine died."""
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(EngineDeadError(f"the engine ended: {reason}"))

    def _begin(self) -> tuple[int, asyncio.Future[str]]:
        call_id = next(self._ids)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        return call_id, future
