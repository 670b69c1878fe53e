"""`EngineClient`s with adapters, whose engine processes have no model (adapter_engine.py)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ostinato import SamplingParams
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.process import engine_child
from ostinato.runtime.types.adapters import ServedAdapter
from tests.runtime.adapter_engine import token_of
from tests.runtime.tiny import tiny_config
from tests.waiting import PATIENCE_S, until

ENDLESS = SamplingParams(max_tokens=90_000)
SHORT = SamplingParams(max_tokens=3)


def without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients start the engine processes of adapter_engine.py."""
    monkeypatch.setattr(engine_child, "ENGINE_MODULE", "tests.runtime.adapter_engine")


@asynccontextmanager
async def started(
    directory: Path, *overrides: str, **values: object
) -> AsyncIterator[EngineClient]:
    config = tiny_config(
        "server.restart_backoff_s=0.01",
        "server.max_restarts=20",
        *overrides,
        lora__allow_runtime_loading=True,
        lora__directory=str(directory),
        **values,
    )
    client = EngineClient(config)
    try:
        await client.start()
        yield client
        assert client.num_unfinished == 0
    finally:
        await client.close()


def run(scenario: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))  # type: ignore[arg-type]


async def tokens(
    client: EngineClient,
    adapter: ServedAdapter | None,
    sampling: SamplingParams = SHORT,
    name: str = "r",
) -> list[int]:
    found: list[int] = []
    async for output in client.generate(name, [5, 6, 7], sampling, adapter=adapter):
        assert output.error is None, output.error
        found += output.new_token_ids
    return found


def expected(adapter: ServedAdapter | None) -> int:
    return token_of("" if adapter is None else adapter.digest)


def free_slots(client: EngineClient) -> int:
    return client.adapters.num_free


async def kill(client: EngineClient, number: int = 0) -> None:
    before = sum(client.restarts.values())
    os.kill(client.replicas[number].pid or 0, signal.SIGKILL)
    await until(lambda: sum(client.restarts.values()) > before)
