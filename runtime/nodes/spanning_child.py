"""`SpanningChild`: an engine with ranks on several machines, as the API process sees it.

Rank 0 is the engine process. It reports where the other ranks can join. Then the other machines are
told to start these ranks. All ranks of the engine end together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ostinato.runtime.process.engine_child import EngineChild
from ostinato.runtime.process.ipc import RanksWanted, StartEngine, first_decoder
from ostinato.runtime.ranks.bridge_messages import StartRankHost

__all__ = ("SpanningChild",)


class SpanningChild:
    """An engine process and the processes that have its ranks on other machines.

    Args:
        engine: has rank 0.
        hosts: one for each further machine, in the order of their ranks.
    """

    def __init__(self, engine: EngineChild, hosts: Sequence[EngineChild]) -> None:
        self.path: Path = engine.path
        self._engine = engine
        self._hosts = hosts
        self._start: StartEngine | None = None  # set until the other machines are told to start
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        return self._engine.pid

    @property
    def node(self) -> str | None:
        return self._engine.node

    @property
    def cpu_seconds(self) -> float:
        return self._engine.cpu_seconds

    @property
    def is_stopped(self) -> bool:
        return self._engine.is_stopped

    @property
    def return_code(self) -> int | None:
        return self._engine.return_code

    async def spawn(self, start: bytes) -> None:
        self._start = msgspec.json.decode(start, type=StartEngine)
        await self._engine.spawn(start)
        self._tasks.append(asyncio.create_task(self._read_engine()))

    async def send(self, parts: Sequence[bytes]) -> None:
        await self._engine.send(parts)

    async def receive(self) -> bytes | None:
        data = await self._inbox.get()
        if data is None:
            self._inbox.put_nowait(None)  # for a further call
        return data

    def kill(self) -> None:
        self._engine.kill()

    async def wait(self) -> None:
        """Wait until the engine process has ended, and the other machines have room again."""
        await self._engine.wait()
        for host in self._hosts if self._tasks[1:] else ():
            host.kill()
            await host.wait()
        for task in self._tasks[1:]:
            await task

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for child in (self._engine, *self._hosts):
            child.close()

    async def _read_engine(self) -> None:
        while (data := await self._engine.receive()) is not None:
            if self._start is not None:
                message = first_decoder.decode(data)
                if isinstance(message, RanksWanted):
                    start, self._start = self._start, None
                    await self._spawn_hosts(start, message)
                    continue
            self._inbox.put_nowait(data)
        self._inbox.put_nowait(None)

    async def _spawn_hosts(self, start: StartEngine, wanted: RanksWanted) -> None:
        for machine, host in enumerate(self._hosts, 1):
            order = StartRankHost(
                config=start.config,
                machine=machine,
                address=wanted.address,
                token=wanted.token,
                name=start.name,
                log_level=start.log_level,
                log_format=start.log_format,
            )
            await host.spawn(msgspec.json.encode(order))
            self._tasks.append(asyncio.create_task(self._read_host(host)))

    async def _read_host(self, host: EngineChild) -> None:
        """Pass on why a host has ended, and end the engine then."""
        while (data := await host.receive()) is not None:
            self._inbox.put_nowait(data)
        await host.wait()
        self._engine.kill()
