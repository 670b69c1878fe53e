"""Engines that end: the next one has the adapters, and a load goes on or fails cleanly."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest

from ostinato.models.adapters.adapter_files import adapter_digest
from ostinato.runtime.errors import EngineDeadError, InvalidRequestError
from tests.runtime.adapter_clients import (
    ENDLESS,
    SHORT,
    expected,
    free_slots,
    kill,
    run,
    started,
    tokens,
    without_models,
)
from tests.runtime.adapter_engine import write_adapter
from tests.waiting import until


@pytest.fixture(autouse=True)
def engines_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    without_models(monkeypatch)


def test_a_restarted_engine_has_its_adapters_before_its_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, "lora.max_adapters=3") as client:
            loaded = [await client.load_adapter(name, name) for name in ("a", "b")]
            gone = await client.load_adapter("c", "c")
            streams = [
                client.generate(each.name, [5], ENDLESS, adapter=each) for each in (*loaded, gone)
            ]
            for stream in streams:
                await anext(stream)
            await client.unload_adapter("c")  # its request goes on
            await kill(client)
            late = asyncio.create_task(tokens(client, loaded[1]))  # comes during the restart
            for stream, adapter in zip(streams, (*loaded, gone), strict=True):
                for _ in range(10):
                    output = await anext(stream)
                    assert output.error is None
                    assert set(output.new_token_ids) <= {expected(adapter)}
            assert await late == [expected(loaded[1])] * 3
            for stream in streams:
                await stream.aclose()
            assert client.adapters.served == tuple(loaded)
            # An adapter that no request uses any more is not loaded again.
            shutil.rmtree(tmp_path / "c")
            await kill(client)
            assert await tokens(client, loaded[0]) == [expected(loaded[0])] * 3
            assert client.restarts == {"killed": 2}

    for name in "abc":
        write_adapter(tmp_path / name, seconds=0.1)
    run(scenario())


def test_an_adapter_that_is_gone_after_a_restart_is_named_and_nothing_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with started(tmp_path, "lora.max_adapters=3") as client:
            good = await client.load_adapter("good", "good")
            bad = await client.load_adapter("bad", "bad")
            stream = client.generate("bad", [5], ENDLESS, adapter=bad)
            await anext(stream)
            write_adapter(tmp_path / "bad", error="its file is truncated")
            with caplog.at_level(logging.ERROR):
                await kill(client)
                outputs = [output async for output in stream]
            assert "does not have the adapter" in (outputs[-1].error or "")
            text = "engine was started again, could not load the adapter 'bad', and refuses its "
            assert f"{text}requests: its file is truncated" in caplog.text
            assert await tokens(client, good) == [expected(good)] * 3
            again = [one async for one in client.generate("again", [5], SHORT, adapter=bad)]
            assert again[-1].error is not None
            with pytest.raises(InvalidRequestError, match="its file is truncated"):
                await client.load_adapter("bad", "bad", in_place=True)
            assert free_slots(client) == 1, "it keeps its slot until it is unloaded"
            write_adapter(tmp_path / "bad")
            assert await client.load_adapter("bad", "bad", in_place=True) == bad
            assert await tokens(client, bad) == [expected(bad)] * 3
            await client.unload_adapter("bad")
            assert free_slots(client) == 2

    write_adapter(tmp_path / "good")
    write_adapter(tmp_path / "bad")
    run(scenario())


@pytest.mark.parametrize("deaths", [1, 2])
def test_an_engine_that_dies_while_it_loads_an_adapter(tmp_path: Path, deaths: int) -> None:
    async def scenario() -> None:
        async with started(tmp_path, "lora.max_adapters=2") as client:
            good = await client.load_adapter("good", "good")
            if deaths == 1:
                adapter = await client.load_adapter("deadly", "deadly")
                assert await tokens(client, adapter) == [expected(adapter)] * 3
            else:
                with pytest.raises(
                    EngineDeadError, match=r"ended 2 times while it loaded .*deadly"
                ):
                    await client.load_adapter("deadly", "deadly")
                assert free_slots(client) == 1
            assert await tokens(client, good) == [expected(good)] * 3
            assert client.restarts == {"killed": deaths}

    write_adapter(tmp_path / "good")
    write_adapter(tmp_path / "deadly", deaths=deaths)
    run(scenario())


def test_an_adapter_that_kills_the_engine_at_a_restart(tmp_path: Path) -> None:
    """The engine that dies in its restart is started again, and counts as a restart."""

    async def scenario() -> None:
        async with started(tmp_path, "lora.max_adapters=2") as client:
            adapter = await client.load_adapter("x", "x")
            stream = client.generate("r", [5], ENDLESS, adapter=adapter)
            await anext(stream)
            write_adapter(tmp_path / "x", deaths=1)
            digest = adapter_digest(tmp_path / "x")
            await kill(client)
            # The files are others now, so the engine refuses requests of the former content.
            assert digest != adapter.digest
            outputs = [output async for output in stream]
            assert "does not have the adapter" in (outputs[-1].error or "")
            assert client.restarts == {"killed": 2}

    write_adapter(tmp_path / "x")
    run(scenario())


def test_a_load_when_no_engine_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, "server.max_restarts=0", "lora.max_adapters=2") as client:
            adapter = await client.load_adapter("x", "x")
            load = asyncio.create_task(client.load_adapter("slow", "slow"))
            await until(lambda: free_slots(client) == 0)
            os.kill(client.engine_pid or 0, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await load
            with pytest.raises(EngineDeadError):
                await client.load_adapter("slow", "slow")
            with pytest.raises(EngineDeadError):
                await tokens(client, adapter)
            assert client.adapters.num_holds(adapter) == 0
            assert free_slots(client) == 1

    write_adapter(tmp_path / "x")
    write_adapter(tmp_path / "slow", file="/nowhere")
    run(scenario())


def test_a_close_during_a_load_ends_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, "lora.max_adapters=1") as client:
            load = asyncio.create_task(client.load_adapter("slow", "slow"))
            await until(lambda: free_slots(client) == 0)
        with pytest.raises(EngineDeadError):
            await load

    write_adapter(tmp_path / "slow", file="/nowhere")
    run(scenario())


def test_every_replica_has_every_adapter(tmp_path: Path) -> None:
    """Also the one that was dead while an adapter was loaded, and a request that moves."""

    async def scenario() -> None:
        overrides = ("parallel.data=2", "parallel.router=round_robin", "lora.max_adapters=3")
        async with started(tmp_path, *overrides) as client:
            a = await client.load_adapter("a", "a")
            assert [await tokens(client, a) for _ in range(2)] == [[expected(a)] * 3] * 2
            streams = [client.generate(f"{i}", [5], ENDLESS, adapter=a) for i in range(2)]
            for stream in streams:
                await anext(stream)
            await kill(client, 1)
            b = await client.load_adapter("b", "b")
            assert all(replica.is_alive for replica in client.replicas)
            for stream in streams:
                for _ in range(10):
                    output = await anext(stream)
                    assert (output.error, {*output.new_token_ids, expected(a)}) == (
                        None,
                        {expected(a)},
                    )
                await stream.aclose()
            assert [await tokens(client, b) for _ in range(4)] == [[expected(b)] * 3] * 4
            await client.reload_weights(timeout_s=0)
            assert [await tokens(client, b) for _ in range(4)] == [[expected(b)] * 3] * 4

    write_adapter(tmp_path / "a")
    write_adapter(tmp_path / "b", seconds=0.2)
    run(scenario())
