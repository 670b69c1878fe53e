"""Adapters of `EngineClient`: which requests get them, and how long they keep their slots."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ostinato import SamplingParams
from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.models.adapters.adapter_files import adapter_digest
from ostinato.runtime.client.adapter_loading import allowed_directory, digest_of
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.types.params import PoolingParams
from tests.runtime.adapter_clients import (
    ENDLESS,
    SHORT,
    expected,
    free_slots,
    run,
    started,
    tokens,
    without_models,
)
from tests.runtime.adapter_engine import write_adapter
from tests.runtime.tiny import tiny_config
from tests.waiting import until


@pytest.fixture(autouse=True)
def engines_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    without_models(monkeypatch)


def test_requests_get_the_adapter_that_they_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(
            tmp_path, "lora.max_adapters=2", lora__adapters={"first": str(first)}
        ) as client:
            assert "adapters" in client.startup_seconds
            [one] = client.adapters.served
            assert (one.name, one.path, one.digest) == ("first", str(first), adapter_digest(first))
            assert one.created > 0
            two = await client.load_adapter("second", "b")  # relative to lora.directory
            assert client.adapters.served == (one, two)
            both = await asyncio.gather(*(tokens(client, each) for each in (None, one, two)))
            assert both == [[expected(each)] * 3 for each in (None, one, two)]
            pooled = await client.pool("p", [5], PoolingParams(), adapter=two)
            assert pooled.data == str(expected(two)).encode()
            with pytest.raises(InvalidRequestError, match=r"no slot is free .*'first', 'second'"):
                await client.load_adapter("third", "b")
            await client.unload_adapter("first")
            with pytest.raises(InvalidRequestError, match="there is no adapter 'first'") as error:
                await tokens(client, one)
            assert error.value.status == 404
            with pytest.raises(InvalidRequestError, match="there is no adapter 'first'"):
                await client.pool("p", [5], PoolingParams(), adapter=one)
            third = await client.load_adapter("third", str(first))
            assert third.slot == one.slot
            assert await tokens(client, third) == [expected(third)] * 3

    first = write_adapter(tmp_path / "elsewhere" / "a")
    write_adapter(tmp_path / "b")
    run(scenario())


def test_a_request_keeps_its_adapter_when_it_is_replaced_or_unloaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, "lora.max_adapters=2") as client:
            old = await client.load_adapter("x", "x")
            stream = client.generate("old", [5], ENDLESS, adapter=old)
            await anext(stream)
            assert await client.load_adapter("x", "x", in_place=True) == old  # nothing has changed
            write_adapter(tmp_path / "x", "other weights")
            new = await client.load_adapter("x", "x", in_place=True)
            assert new.slot != old.slot
            assert client.adapters.get("x") == new
            assert await tokens(client, new) == [expected(new)] * 3
            await client.unload_adapter("x")
            assert free_slots(client) == 1
            for name in ("y", "z"):  # these take the other slot, one after the other
                write_adapter(tmp_path / name)
                other = await client.load_adapter(name, name)
                assert other.slot == new.slot
                assert await tokens(client, other) == [expected(other)] * 3
                await client.unload_adapter(name)
            for _ in range(20):
                assert (await anext(stream)).new_token_ids == [expected(old)]
            await stream.aclose()
            assert free_slots(client) == 2

    write_adapter(tmp_path / "x")
    run(scenario())


def test_every_end_of_a_request_releases_its_adapter(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, "lora.max_adapters=1") as client:
            adapter = await client.load_adapter("x", "x")

            async def no_holds() -> None:
                await until(lambda: client.adapters.num_holds(adapter) == 0)

            with pytest.raises(InvalidRequestError, match="0 tokens"):
                await anext(client.generate("bad", [], SHORT, adapter=adapter))
            await no_holds()
            bad = SamplingParams(bad_words=("x",))
            with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
                await anext(client.generate("bad", [5], bad, adapter=adapter))
            await no_holds()
            with pytest.raises(InvalidRequestError):
                await client.pool("bad", [], PoolingParams(), adapter=adapter)
            client.generate("never begun", [5], SHORT, adapter=adapter)
            await no_holds()
            task = asyncio.create_task(tokens(client, adapter, ENDLESS))
            await until(lambda: client.num_unfinished == 1)
            assert client.adapters.num_holds(adapter) == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await no_holds()
            stream = client.generate("left", [5], ENDLESS, adapter=adapter)
            await anext(stream)
            assert client.adapters.num_holds(adapter) == 1
            del stream
            await no_holds()
            task = asyncio.create_task(tokens(client, adapter, ENDLESS, "aborted"))
            await until(lambda: client.num_unfinished == 1)
            await client.abort("aborted")
            await task
            await no_holds()
            assert await tokens(client, adapter) == [expected(adapter)] * 3
            await no_holds()
            await client.unload_adapter("x")
            assert free_slots(client) == 1

    write_adapter(tmp_path / "x")
    run(scenario())


def test_a_slot_is_only_loaded_when_no_engine_runs_its_requests(tmp_path: Path) -> None:
    """The engine refuses a load into a slot that a request uses."""

    async def scenario() -> None:
        async with started(tmp_path, "parallel.data=2", "lora.max_adapters=1") as client:
            ended: list[asyncio.Task[list[int]]] = []
            for index in range(20):
                name = "xy"[index % 2]
                adapter = await client.load_adapter(name, name)
                tasks = [
                    asyncio.create_task(tokens(client, adapter, ENDLESS, f"{index}-{number}"))
                    for number in range(4)
                ]
                await until(lambda: client.num_unfinished >= 4)
                await client.unload_adapter(name)
                for task in tasks:
                    task.cancel()
                ended += tasks
                while not free_slots(client):
                    await asyncio.sleep(0)
            await asyncio.gather(*ended, return_exceptions=True)

    for name in "xy":
        write_adapter(tmp_path / name)
    run(scenario())


def test_an_adapter_that_can_not_be_loaded_takes_no_slot(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, "parallel.data=2", "lora.max_adapters=1") as client:
            with pytest.raises(InvalidRequestError, match="engine 0: no rank of 3") as error:
                await client.load_adapter("broken", "broken")
            assert (error.value.status, error.value.param) == (400, "lora_path")
            assert free_slots(client) == 1
            good = await client.load_adapter("good", "good")
            assert await tokens(client, good) == [expected(good)] * 3

    write_adapter(tmp_path / "broken", error="no rank of 3")
    write_adapter(tmp_path / "good")
    run(scenario())


def test_loads_of_one_name_and_a_caller_that_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, "lora.max_adapters=2") as client:
            stream = client.generate("base", [5], ENDLESS)
            await anext(stream)
            load = asyncio.create_task(client.load_adapter("slow", "slow"))
            await until(lambda: free_slots(client) == 1)
            for refused in (
                client.load_adapter("slow", "slow", in_place=True),
                client.unload_adapter("slow"),
            ):
                with pytest.raises(InvalidRequestError, match="is being loaded") as error:
                    await refused
                assert error.value.status == 409
            assert client.adapters.get("slow") is None
            assert (await anext(stream)).new_token_ids == [expected(None)]  # steps go on
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
            assert free_slots(client) == 1, "the engine still writes into the slot"
            end.touch()
            await until(lambda: client.adapters.get("slow") is not None)
            assert await tokens(client, client.adapters.get("slow"))
            await stream.aclose()

    end = tmp_path / "end of the load"
    write_adapter(tmp_path / "slow", file=str(end))
    run(scenario())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "there is no such directory in lora.directory="),
        ("../outside", "is not in lora.directory="),
        ("/", "is not in lora.directory="),
        ("link", "is not in lora.directory="),
        ("links/out", "'adapter_model.safetensors' is a link that leads out of lora.directory="),
        ("a\0b", "cannot be read"),
        ("x" * 5000, "cannot be read"),
        ("loop", "cannot be read|no such directory"),
        ("empty", "has no "),
    ],
)
def test_only_adapters_in_the_directory_are_loaded(tmp_path: Path, path: str, message: str) -> None:
    allowed = tmp_path / "allowed"
    outside = write_adapter(tmp_path / "outside")
    write_adapter(allowed / "links" / "out")
    (allowed / "links" / "out" / "adapter_model.safetensors").unlink()
    (allowed / "links" / "out" / "adapter_model.safetensors").symlink_to(
        outside / "adapter_model.safetensors"
    )
    (allowed / "link").symlink_to(outside)
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "empty").mkdir()

    lora = LoraConfig(allow_runtime_loading=True, directory=str(allowed))
    with pytest.raises(InvalidRequestError, match=message) as error:
        digest_of(allowed_directory(path, lora))
    assert (error.value.status, error.value.param) == (400, "lora_path")


def test_links_inside_the_directory_are_followed(tmp_path: Path) -> None:
    write_adapter(tmp_path / "real" / "x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "alias").symlink_to(tmp_path / "real" / "x")
    lora = LoraConfig(allow_runtime_loading=True, directory=str(tmp_path / "link"))
    expected_path = (tmp_path / "real" / "x").resolve()
    for path in ("alias", "x", str(tmp_path / "real" / "x"), str(tmp_path / "link" / "alias")):
        assert allowed_directory(path, lora) == expected_path


def test_clients_may_not_load_adapters_by_default(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"lora\.allow_runtime_loading=true") as error:
        allowed_directory(str(tmp_path), LoraConfig(max_adapters=1))
    assert error.value.status == 403


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        (
            "sql",
            "/no/such/directory",
            r"lora\.adapters, sql=/no/such/directory: .* is neither a dir",
        ),
        ("sql", "a:b:c", "is neither a directory nor a hub id"),
        ("fake", "{here}/good", "is the name of the served model"),
        ("sql", "{here}/broken", "sql=.*/broken: no rank of 3"),
        ("sql", "{here}", "has no file adapter_config.json"),
    ],
)
def test_a_configured_adapter_that_can_not_be_loaded_ends_the_start(
    tmp_path: Path, name: str, path: str, message: str
) -> None:
    write_adapter(tmp_path / "good")
    write_adapter(tmp_path / "broken", error="no rank of 3")

    async def scenario() -> None:
        client = EngineClient(
            tiny_config(lora__adapters={name: path.replace("{here}", str(tmp_path))})
        )
        try:
            with pytest.raises(StartupError, match=message) as error:
                await client.start()
            assert "\n" not in str(error.value)
        finally:
            await client.close()

    run(scenario())
