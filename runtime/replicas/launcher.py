"""Starts the engine processes of one replica."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import InstructionSetName
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.errors import StartupError
from ostinato.runtime.process.engine_child import EngineChild
from ostinato.runtime.process.engine_process import EngineProcess
from ostinato.runtime.process.ipc import EngineReady, StartEngine
from ostinato.runtime.types.engine_info import ServedModel

__all__ = ("EngineLauncher",)

# A restart is ended after ten times the seconds of the first start, but never before this limit.
_SHORTEST_START_LIMIT_S = 300.0
# Properties of the model that requests are checked against. A restart must not change them.
_FACTS = ("vocab_size", "eos_token_ids", "tasks", "embedding_size", "num_labels", "num_segments")


class EngineLauncher:
    """Starts engine processes, one at a time.

    Args:
        name: the name of the replica's processes, in messages and logs.
        config: the engine's configuration.
        server: the settings for logs and profiles.
        path: path of the socket files, without the number of the process.
        make_child: takes the path of the socket's file; makes a process, which is not started.

    Attributes:
        name: the name of the replica's processes.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        server: ServerConfig,
        path: Path,
        make_child: Callable[[Path], EngineChild],
    ) -> None:
        self.name = name
        self._config = config
        self._server = server
        self._path = path
        self._make_child = make_child
        self._counter = itertools.count()
        self._limit_s = _SHORTEST_START_LIMIT_S
        self._model: ServedModel | None = None  # the model of the first process

    async def spawn(self) -> EngineProcess:
        """Start a process. The call returns at once; the process then loads the model.

        Raises:
            StartupError: the system cannot start another process or open its socket.
        """
        path = self._path.with_name(f"{self._path.name}-{next(self._counter)}")
        server = self._server
        start = StartEngine(
            config=self._config,
            name=self.name,
            log_level=server.log_level,
            log_format=server.log_format,
            flight_recorder_steps=server.flight_recorder_steps,
            profile_dir=server.profile_dir,
        )
        try:
            engine = EngineProcess(self._make_child(path))
            try:
                await engine.spawn(msgspec.json.encode(start))
            except BaseException:
                await engine.close()
                raise
        except (OSError, zmq.ZMQError) as error:
            raise StartupError(f"the {self.name} process cannot be started: {error}") from error
        return engine

    async def wait_for_first(
        self, engine: EngineProcess, on_phase: Callable[[str, float], None]
    ) -> EngineReady:
        """Wait until the first process serves.

        Later processes get the context length and the instruction set of the first. So they accept
        every request that the first process accepts, and their kernels compute the same values.

        Args:
            engine: from `spawn`.
            on_phase: called with each finished phase of the start and its seconds.

        Raises:
            StartupError: the engine cannot start; the message is one line.
        """
        begin = time.monotonic()
        ready = await engine.wait_until_ready(on_phase)
        section = replace(self._config.model, max_model_len=ready.model.max_model_len)
        self._config = replace(self._config, model=section)
        if isa := ready.model.isa:
            device = replace(self._config.device, isa=InstructionSetName(isa))
            self._config = replace(self._config, device=device)
        self._model = ready.model
        seconds = max(sum(ready.model.startup_seconds.values()), time.monotonic() - begin)
        self._limit_s = max(_SHORTEST_START_LIMIT_S, 10 * seconds)
        return ready

    async def wait_for_next(self, engine: EngineProcess) -> EngineReady:
        """Wait until a later process serves. If it fails or takes too long, it is killed.

        Raises:
            StartupError: the engine cannot start, takes too long, or has another kind of model;
                the message is one line.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                ready = await engine.wait_until_ready(lambda name, seconds: None)
        except TimeoutError as error:
            engine.kill()
            raise StartupError(f"it took more than {self._limit_s:.0f} s") from error
        except StartupError:
            engine.kill()
            raise
        assert self._model is not None, "the first one served"
        for name in _FACTS:
            before, now = getattr(self._model, name), getattr(ready.model, name)
            if now != before:
                engine.kill()
                raise StartupError(
                    f"the model's {name} was {before} and is now {now}, and the requests of this "
                    "server depend on it; start a new server for this model"
                )
        return ready
