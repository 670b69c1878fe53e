"""Later engine processes must match the first one; the processes are scripted."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from ostinato.runtime.errors import StartupError
from ostinato.runtime.process.engine_child import LocalChild
from ostinato.runtime.process.ipc import EngineReady
from ostinato.runtime.replicas.launcher import EngineLauncher
from ostinato.runtime.types.engine_info import EngineStats, ServedModel
from tests.runtime.tiny import tiny_config


class ScriptedEngine:
    """Stands in for an engine process that has started, and is ready at once."""

    def __init__(self, **model: Any) -> None:
        facts = {"name": "m", "max_model_len": 64, "vocab_size": 300, "eos_token_ids": (1,)}
        self._model = ServedModel(tokenizer="", **(facts | model))
        self.is_killed = False

    async def wait_until_ready(self, on_phase: Callable[[str, float], None]) -> EngineReady:
        return EngineReady(self._model, EngineStats())

    def kill(self) -> None:
        self.is_killed = True


def start(first: ScriptedEngine, second: ScriptedEngine) -> EngineLauncher:
    config = tiny_config()
    launcher = EngineLauncher(
        "engine 1",
        config.engine,
        config.server,
        Path("unused"),
        functools.partial(LocalChild, zmq.asyncio.Context.instance()),
    )

    async def both() -> None:
        await launcher.wait_for_first(first, lambda name, seconds: None)
        await launcher.wait_for_next(second)

    asyncio.run(both())
    return launcher


def test_other_weights_of_the_same_model_are_accepted() -> None:
    second = ScriptedEngine(created=5, startup_seconds={"weights": 2.0})
    launcher = start(ScriptedEngine(), second)
    assert not second.is_killed
    assert launcher._config.model.max_model_len == 64


def test_a_process_that_cannot_be_started_leaves_no_socket(tmp_path: Path) -> None:
    """`term` of the context waits for open sockets, so a server would hang instead of ending."""
    children: list[LocalChild] = []

    def make_child(path: Path) -> LocalChild:
        children.append(LocalChild(zmq.asyncio.Context.instance(), path))
        return children[-1]

    config = tiny_config()
    path = tmp_path / ("x" * 200) / "engine"  # the system allows about 100 characters
    launcher = EngineLauncher("engine", config.engine, config.server, path, make_child)
    with pytest.raises(StartupError, match="the engine process cannot be started"):
        asyncio.run(launcher.spawn())
    assert [child._socket.closed for child in children] == [True]


@pytest.mark.parametrize("change", [{"vocab_size": 301}, {"eos_token_ids": (1, 2)}])
def test_a_model_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    second = ScriptedEngine(**change)
    with pytest.raises(StartupError, match=f"the model's {next(iter(change))} was "):
        start(ScriptedEngine(), second)
    assert second.is_killed
