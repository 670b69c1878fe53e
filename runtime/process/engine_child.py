"""`EngineChild`: one engine process, and how messages reach it. Imports no torch.

`LocalChild` is a process on this machine. `RemoteChild` (runtime/nodes) is one on another machine.
`SpanningChild` (runtime/nodes) is an engine with ranks on several machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from ostinato.conf.environment import with_visible_gpus
from ostinato.runtime.early_start.child_process import ChildProcess
from ostinato.runtime.early_start.early_engine import EarlyEngine
from ostinato.runtime.engine.flight_recorder import flight_path
from ostinato.runtime.errors import EngineDeadError

__all__ = ("ENGINE_MODULE", "EngineChild", "LocalChild")

# The module that an engine process runs. A benchmark of the API process replaces it.
ENGINE_MODULE = "ostinato.runtime.process.engine_main"


class EngineChild(Protocol):
    """An engine process on this or another machine. `spawn` starts it once.

    Attributes:
        path: path of the socket's file. The file of the flight recorder (`flight_path`) lies in the
            same directory, if there is one.
    """

    path: Path

    @property
    def pid(self) -> int | None:
        """The process id on the machine that the process runs on; None before it is started."""
        ...

    @property
    def node(self) -> str | None:
        """The name of the other machine that the process runs on.

        None = it runs on this machine, or is not placed yet.
        """
        ...

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all threads of the process in seconds; 0 if there is no process."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped, as by SIGSTOP."""
        ...

    @property
    def return_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        ...

    async def spawn(self, start: bytes) -> None:
        """Start the process.

        Args:
            start: a `StartEngine`, or for a host of ranks a `StartRankHost`, as one line of JSON.

        Raises:
            OSError: the system cannot start another process.
            zmq.ZMQError: the socket cannot be bound.
        """
        ...

    async def send(self, parts: Sequence[bytes]) -> None:
        """Send a message of one or more parts.

        Raises:
            EngineDeadError: the process has closed its socket.
        """
        ...

    async def receive(self) -> bytes | None:
        """The next message; None when the process has ended and all its messages were returned."""
        ...

    def kill(self) -> None:
        """Send SIGKILL to the process, if it has not ended."""
        ...

    async def wait(self) -> None:
        """Wait until the process has ended."""
        ...

    def close(self) -> None:
        """Free the socket and files of a process that has ended. Safe to call twice."""
        ...


class LocalChild:
    """An engine process on this machine, with a ZeroMQ socket between it and this process."""

    node = None

    def __init__(
        self,
        context: zmq.asyncio.Context,
        path: Path,
        gpus: str | None = None,
        module: str | None = None,
        early: EarlyEngine | None = None,
    ) -> None:
        """
        Args:
            context: makes the socket. The caller closes the context after this object.
            path: the path of the socket's file, which does not exist yet.
            gpus: the only GPUs that the process sees; None = those of this process.
            module: the module that the process runs; None = ENGINE_MODULE.
            early: holds a process that was started early, which is taken. If `early` is None or
                holds no process, a new process is started.
        """
        self.path = path
        self._socket = context.socket(zmq.PAIR)
        self._gpus = gpus
        self._module = module
        self._early = early
        self._process: ChildProcess | None = None
        self._ended: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def cpu_seconds(self) -> float:
        import psutil

        try:
            times = psutil.Process(self.pid).cpu_times() if self.pid is not None else None
        except psutil.Error:  # it has ended
            times = None
        return 0.0 if times is None else times.user + times.system

    @property
    def is_stopped(self) -> bool:
        import psutil

        try:
            return self.pid is not None and (
                psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
            )
        except psutil.Error:  # it has ended
            return False

    @property
    def return_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def spawn(self, start: bytes) -> None:
        address = f"ipc://{self.path}"
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        process = None if self._early is None else self._early.take()
        if process is None:
            command = (sys.executable, "-m", self._module or ENGINE_MODULE, address)
            process = ChildProcess(command, with_visible_gpus(self._gpus))
        else:  # it was started without an address
            start = f"{address}\n".encode() + start
        self._process = process
        self._ended = asyncio.create_task(process.wait())
        # `receive` reports a process that ended. A long message can wait for the process to read.
        with contextlib.suppress(ConnectionError):
            await asyncio.to_thread(process.write, start + b"\n")

    async def send(self, parts: Sequence[bytes]) -> None:
        # The queue has no limit, so a send waits only if the other side is gone. It would then wait
        # for ever. Large parts are not copied: a thread of ZeroMQ writes them.
        try:
            await self._socket.send_multipart(parts, flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            raise EngineDeadError("the engine ended: it closed its socket") from error

    async def receive(self) -> bytes | None:
        assert self._ended is not None, "called after spawn"
        receive = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({receive, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            # The last message of a process can arrive a moment after its end. A process that was
            # killed wrote no last message, and its requests wait for a new process.
            if not receive.done():
                killed = self.return_code == -signal.SIGKILL
                await asyncio.wait({receive}, timeout=0.02 if killed else 0.2)
            return receive.result() if receive.done() else None
        finally:
            receive.cancel()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> None:
        if self._ended is not None:
            await asyncio.shield(self._ended)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close(linger=0)
        self.path.unlink(missing_ok=True)
        flight_path(self.path).unlink(missing_ok=True)
