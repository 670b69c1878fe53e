"""An engine process that is started before its configuration is known."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq.asyncio

from ostinato.commands import run
from ostinato.runtime.early_start.early_engine import EarlyEngine
from ostinato.runtime.process.engine_child import LocalChild
from ostinato.runtime.process.engine_process import EngineProcess
from ostinato.runtime.process.ipc import StartEngine
from tests.runtime.tiny import tiny_config
from tests.waiting import wait_until


def engines() -> list[psutil.Process]:
    """The running engine processes that this process has started."""
    return [
        one
        for one in psutil.Process().children()
        if one.status() != psutil.STATUS_ZOMBIE
        and "ostinato.runtime.process.engine_main" in one.cmdline()
    ]


def test_little_is_imported_before_the_engine_process_starts() -> None:
    code = (
        "import sys, ostinato.commands, ostinato.runtime.early_start.early_engine\n"
        "heavy = ('asyncio', 'hydra', 'litestar', 'msgspec', 'numpy', 'zmq')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_the_first_engine_is_the_early_process(tmp_path: Path) -> None:
    config = tiny_config()
    start = msgspec.json.encode(
        StartEngine(
            config=config.engine,
            name="engine",
            log_level="warning",
            log_format="text",
            flight_recorder_steps=0,
            profile_dir="",
        )
    )

    async def serve() -> None:
        with EarlyEngine() as early:
            (process,) = engines()
            with zmq.asyncio.Context() as context:
                child = LocalChild(context, tmp_path / "socket", early=early)
                engine = EngineProcess(child)
                await engine.spawn(start)
                phases: list[str] = []
                ready = await engine.wait_until_ready(lambda name, seconds: phases.append(name))
                assert (child.pid, child.return_code) == (process.pid, None)
                assert ready.model.max_model_len == 256
                assert phases[:2] == ["imports", "open"]
                assert early.take() is None  # a restart starts a process of its own
                await engine.stop()
                assert engine.return_code == 0
                await engine.close()
        assert not engines()

    asyncio.run(serve())


def test_an_early_process_that_is_not_used_is_ended() -> None:
    early = EarlyEngine()
    assert len(engines()) == 1
    early.close()
    early.close()
    assert not engines()
    assert early.take() is None


def test_a_dead_early_process_is_not_taken() -> None:
    with EarlyEngine() as early:
        (process,) = engines()
        process.kill()
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert early.take() is None


def test_a_wrong_command_line_leaves_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "modle=x"]) == 2
    assert "modle" in capsys.readouterr().err
    assert not engines()
