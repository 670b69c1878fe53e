"""Whatever goes wrong while an engine is started again, its requests end."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from ostinato import SamplingParams
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import EngineDeadError
from tests.runtime.client.engine_clients import long_config
from tests.waiting import until

# The engine works on this for a second or more, so it is killed meanwhile.
LONG = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)


async def _tokens(client: EngineClient, begun: asyncio.Event) -> list[int]:
    tokens: list[int] = []
    async for output in client.generate("r", [5, 6, 7], LONG):
        tokens += output.new_token_ids
        begun.set()
    return tokens


@pytest.mark.parametrize("error", [OSError("no more processes"), RuntimeError("a planted fault")])
def test_a_restart_that_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error is tried again. After a fault of the program, requests end with an error."""

    async def scenario() -> None:
        client = EngineClient(long_config("server.restart_backoff_s=0.01"))
        await client.start()
        try:
            [replica] = client.replicas
            begun = asyncio.Event()
            answer = asyncio.create_task(_tokens(client, begun))
            await begun.wait()
            spawn, failures = replica._launcher.spawn, [error]

            async def fail_once() -> object:
                if failures:
                    raise failures.pop()
                return await spawn()

            monkeypatch.setattr(replica._launcher, "spawn", fail_once)
            os.kill(replica.pid or 0, signal.SIGKILL)
            if isinstance(error, OSError):
                assert len(await answer) == LONG.max_tokens
                await until(lambda: replica.status.state == "serving")
                return
            with pytest.raises(EngineDeadError, match="its supervision failed"):
                await answer
            with pytest.raises(EngineDeadError):
                await _tokens(client, begun)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 200))
