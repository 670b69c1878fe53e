"""`EngineClient`s of a tiny model, and requests that do not end while a test acts on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from ostinato import SamplingParams
from ostinato.conf.root import RunConfig
from ostinato.runtime.client.client import EngineClient
from tests.runtime.tiny import MODEL, tiny_config

__all__ = (
    "ENDLESS",
    "Run",
    "Scenario",
    "engine_pid",
    "long_config",
    "run_with_own_client",
    "started",
)

# The engine works on this for seconds. A shorter request may end while the test process is paused.
ENDLESS = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True)

Scenario = Callable[[EngineClient], Awaitable[None]]
Run = Callable[[Scenario], None]


def long_config(*overrides: str) -> RunConfig:
    """`tiny_config` with a context that is long enough for `ENDLESS`."""
    return tiny_config(*overrides, model__config={**MODEL, "max_position_embeddings": 8192})


def engine_pid(client: EngineClient) -> int:
    assert client.engine_pid is not None
    return client.engine_pid


@asynccontextmanager
async def started(*overrides: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(long_config(*overrides))
    try:
        await client.start()
        yield client
        assert client.stats.late_compiles == []
    finally:
        await client.close()


def run_with_own_client(scenario: Scenario, *overrides: str) -> None:
    """Runs a scenario with a client of its own. The scenario may kill the client's engine."""

    async def run() -> None:
        async with started(*overrides) as client:
            await scenario(client)

    asyncio.run(run())
