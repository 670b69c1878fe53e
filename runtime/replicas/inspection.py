"""Asks the engine for its state, for `/debug/state` and the web page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from ostinato.runtime.engine.engine_state import EngineState

__all__ = ("Inspector",)

_FRESH_S = 0.2


class Inspector:
    """Shares an answer between concurrent callers, and keeps it for 0.2 s.

    Args:
        send: asks the engine. `answer` must be called with the reply.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self, send: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._clock = clock
        self._asked: asyncio.Future[EngineState] | None = None
        self._last: tuple[float, EngineState] | None = None

    async def ask(self, timeout_s: float) -> EngineState:
        """The engine's state, at most 0.2 s old.

        Raises:
            TimeoutError: no answer within `timeout_s`.
        """
        if self._last is not None and self._clock() - self._last[0] < _FRESH_S:
            return self._last[1]
        asked = self._asked
        if asked is None:
            asked = self._asked = asyncio.get_running_loop().create_future()
            try:
                await self._send()
            except BaseException:
                self._asked = None
                raise
        try:
            return await asyncio.wait_for(asyncio.shield(asked), timeout_s)
        except TimeoutError:
            # A restarted engine did not get the question, so the next call sends it again.
            if self._asked is asked:
                self._asked = None
            raise

    def answer(self, state: EngineState) -> None:
        """Hand the engine's reply to the callers."""
        self._last = self._clock(), state
        asked, self._asked = self._asked, None
        if asked is not None and not asked.done():
            asked.set_result(state)
