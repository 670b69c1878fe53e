"""`RemoteChild`: an engine process on another machine, as the API process sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from ostinato.runtime.engine.flight_recorder import flight_path
from ostinato.runtime.errors import EngineDeadError
from ostinato.runtime.nodes.node_messages import Beat, Ended, FromEngine, Kill, Started, ToEngine
from ostinato.runtime.process.ipc import EngineFailed, encoder

__all__ = ("Post", "RemoteChild")

Post = Callable[[Kill | ToEngine], None]
"""Sends an order to the machine of an engine."""


class RemoteChild:
    """An engine process on another machine. It starts when there is a machine with room.

    If the connection to the machine is lost, the process counts as killed. The machine then ends
    the process.
    """

    def __init__(
        self,
        number: int,
        path: Path,
        place: Callable[[RemoteChild, bytes], None],
        *,
        is_rank_host: bool = False,
    ) -> None:
        """
        Args:
            number: the number of the engine in messages.
            path: the flight recorder's file is written beside this path when the engine has ended.
            place: queues the process for a machine. `begin` is called when it has one.
            is_rank_host: the process has ranks of an engine whose first rank is on another machine.
        """
        self.number = number
        self.path = path
        self.is_rank_host = is_rank_host
        self._place = place
        self._post: Post | None = None
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._return_code: int | None = None
        self._pid: int | None = None
        self._node: str | None = None
        self._cpu_seconds = 0.0
        self._is_stopped = False

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def node(self) -> str | None:
        return self._node

    @property
    def cpu_seconds(self) -> float:
        return self._cpu_seconds

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    @property
    def return_code(self) -> int | None:
        return self._return_code

    async def spawn(self, start: bytes) -> None:
        self._place(self, start)

    def begin(self, node: str, post: Post) -> None:
        """Note that a machine was told to start the process.

        Args:
            node: the machine's name.
            post: sends orders to the machine.
        """
        self._node, self._post = node, post

    async def send(self, parts: Sequence[bytes]) -> None:
        if self._post is None or self._ended.is_set():
            raise EngineDeadError("the engine does not run")
        self._post(ToEngine(self.number, parts))

    async def receive(self) -> bytes | None:
        data = await self._inbox.get()
        if data is None:
            self._inbox.put_nowait(None)  # the next call must return None too
        return data

    def take(self, report: Started | FromEngine | Ended | Beat) -> None:
        """Handle a message from the machine."""
        if isinstance(report, FromEngine):
            self._inbox.put_nowait(report.data)
        elif isinstance(report, Started):
            self._pid = report.pid
        elif isinstance(report, Beat):
            self._cpu_seconds = report.cpu_seconds.get(self.number, self._cpu_seconds)
            self._is_stopped = self.number in report.stopped
        else:
            if report.flight:
                with contextlib.suppress(OSError):  # the disk is full: the end is handled anyway
                    flight_path(self.path).write_bytes(report.flight)
            self._end(report.return_code)

    def lose(self, reason: str) -> None:
        """Count the process as killed: its machine was lost, or no machine will run it."""
        if not self._ended.is_set():
            failed = EngineFailed(reason, at_start=False, reason="killed")
            self._inbox.put_nowait(encoder().encode(failed))
            self._end(-signal.SIGKILL)

    def kill(self) -> None:
        if self._ended.is_set():
            return
        if self._post is None:
            self._end(-signal.SIGKILL)  # it was never started
        else:
            self._post(Kill(self.number))

    async def wait(self) -> None:
        await self._ended.wait()

    def close(self) -> None:
        flight_path(self.path).unlink(missing_ok=True)

    def _end(self, return_code: int) -> None:
        self._return_code = return_code
        self._inbox.put_nowait(None)
        self._ended.set()
