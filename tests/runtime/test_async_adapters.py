"""`AsyncEngine` with adapters; its engine processes have no model (adapter_engine.py)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ostinato import AsyncEngine, LoRARequest
from ostinato.models.adapters.adapter_files import adapter_digest
from ostinato.runtime.errors import InvalidRequestError
from tests.runtime.adapter_clients import ENDLESS, SHORT, run, without_models
from tests.runtime.adapter_engine import token_of, write_adapter
from tests.runtime.tiny import tiny_config
from tests.waiting import until


@pytest.fixture(autouse=True)
def engines_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    without_models(monkeypatch)


async def tokens(engine: AsyncEngine, one: LoRARequest | None) -> set[int]:
    found: set[int] = set()
    async for output in engine.generate([5, 6], SHORT, lora_request=one):
        assert output.error is None, output.error
        found |= set(output.new_token_ids)
    return found


def test_adapters_are_loaded_when_they_are_named(tmp_path: Path) -> None:
    names = "abcd"
    asked = {
        name: LoRARequest(name, number, str(write_adapter(tmp_path / name, seconds=0.05)))
        for number, name in enumerate(names, 1)
    }
    expected = {name: {token_of(adapter_digest(tmp_path / name))} for name in names}

    async def scenario() -> None:
        config = tiny_config("lora.max_adapters=3", lora__adapters={"a": asked["a"].lora_path})
        async with AsyncEngine(config=config) as engine:
            assert await tokens(engine, None) == {token_of("")}
            assert not await engine.add_lora(asked["a"])  # it is configured
            # Concurrent calls load an adapter once, also if there are more adapters than slots.
            several = [name for name in names for _ in range(4)]
            for name, found in zip(
                several,
                await asyncio.gather(*(tokens(engine, asked[name]) for name in several)),
                strict=True,
            ):
                assert found == expected[name]
            assert len(await engine.list_loras()) == 3
            assert await engine.add_lora(LoRARequest("a", 9, str(tmp_path / "b")))
            assert await tokens(engine, LoRARequest("a", 9, str(tmp_path / "b"))) == expected["b"]
            assert 9 in await engine.list_loras()
            assert await engine.remove_lora(9)
            assert not await engine.remove_lora(9)
            with pytest.raises(InvalidRequestError, match="neither a directory nor a hub id"):
                await engine.add_lora(LoRARequest("x", 10, "/no/such"))
            assert len(await engine.list_loras()) == 2, "a wrong path replaces no adapter"

    run(scenario())


def test_an_adapter_in_use_is_not_replaced_and_a_cancelled_load_is_found_again(
    tmp_path: Path,
) -> None:
    end = tmp_path / "end of the load"
    one = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", file=str(end))))
    other = LoRARequest("b", 2, str(write_adapter(tmp_path / "b")))

    async def scenario() -> None:
        async with AsyncEngine(config=tiny_config("lora.max_adapters=1")) as engine:
            assert engine.client is not None
            adapters = engine.client.adapters
            first = asyncio.create_task(tokens(engine, one))
            await until(lambda: adapters.num_free == 0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            end.touch()
            assert await tokens(engine, one) == {token_of(adapter_digest(tmp_path / "a"))}
            assert await engine.list_loras() == {1}
            stream = engine.generate([5], ENDLESS, lora_request=one)
            await anext(stream)
            with pytest.raises(InvalidRequestError, match=r"no slot is free .*'a'"):
                await tokens(engine, other)
            await stream.aclose()
            await until(lambda: adapters.num_holds(adapters.served[0]) == 0)
            assert await tokens(engine, other) == {token_of(adapter_digest(tmp_path / "b"))}
            write_adapter(tmp_path / "b", "others")
            again = LoRARequest("b", 2, other.lora_path, load_inplace=True)
            assert await tokens(engine, again) == {token_of(adapter_digest(tmp_path / "b"))}

    run(scenario())


def test_without_slots_and_before_the_start() -> None:
    one = LoRARequest("a", 1, "/no/such")

    async def scenario() -> None:
        engine = AsyncEngine(config=tiny_config())
        for call in (engine.add_lora(one), engine.remove_lora(1), engine.list_loras()):
            with pytest.raises(InvalidRequestError, match="the engine was not started"):
                await call

    run(scenario())
