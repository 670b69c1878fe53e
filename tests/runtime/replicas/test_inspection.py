"""Concurrent requests for the same inspection share one question to the engine."""

from __future__ import annotations

import asyncio

import pytest

from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.replicas.inspection import Inspector

STATE: EngineState = object()  # type: ignore[assignment] - passed through, never looked at


def test_concurrent_callers_share_one_answer() -> None:
    async def scenario() -> None:
        now, sent = [0.0], []

        async def send() -> None:
            sent.append(1)

        inspector = Inspector(send, lambda: now[0])
        asking = [asyncio.create_task(inspector.ask(30)) for _ in range(5)]
        await asyncio.sleep(0)
        inspector.answer(STATE)
        assert await asyncio.gather(*asking) == [STATE] * 5
        assert await inspector.ask(30) is STATE  # fresh enough
        assert len(sent) == 1
        now[0] = 1.0
        late = asyncio.create_task(inspector.ask(30))
        await asyncio.sleep(0)
        assert len(sent) == 2
        inspector.answer(STATE)
        await late

    asyncio.run(scenario())


def test_after_a_timeout_the_next_caller_sends_a_new_question() -> None:
    async def scenario() -> None:
        sent = []

        async def send() -> None:
            sent.append(1)

        inspector = Inspector(send)
        for count in (1, 2):
            with pytest.raises(TimeoutError):
                await inspector.ask(0.01)
            assert len(sent) == count

    asyncio.run(scenario())
