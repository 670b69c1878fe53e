"""Starts and ends one engine process and exchanges messages with it. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from ostinato.conf.environment import with_visible_gpu
from ostinato.runtime.engine.flight_recorder import flight_path
from ostinato.runtime.errors import EngineDeadError, StartupError
from ostinato.runtime.process.ipc import (
    ClientMessage,
    EngineFailed,
    EngineMessage,
    EngineReady,
    Phase,
    Shutdown,
    encoder,
    engine_decoder,
    without_repetition,
)

__all__ = ("ENGINE_MODULE", "EngineProcess")

# A benchmark of the API process alone runs another one.
ENGINE_MODULE = "ostinato.runtime.process.engine_main"

_CLOSE_S = 5.0  # how long a closing engine process gets before it is killed


class EngineProcess:
    """One engine process and its socket. `spawn` starts it once, `stop` or `close` ends it.

    Args:
        context: makes the socket; it outlives this object.
        path: the path of the socket's file, which does not exist yet.
        gpu: the only GPU that the process sees; None = those of this process.
    """

    def __init__(self, context: zmq.asyncio.Context, path: Path, gpu: str | None = None) -> None:
        self._encoder = encoder()
        self._grammar = ""  # sent last
        self._socket = context.socket(zmq.PAIR)
        self.path = path
        self._gpu = gpu
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """The process id; None before `spawn`."""
        return None if self._process is None else self._process.pid

    @property
    def cpu_seconds(self) -> float:
        """Seconds of processor time that all its threads have used; 0 without a process."""
        import psutil

        try:
            times = psutil.Process(self.pid).cpu_times() if self.pid is not None else None
        except psutil.Error:  # it has ended
            times = None
        return 0.0 if times is None else times.user + times.system

    @property
    def return_code(self) -> int:
        """The exit code of the process, which has ended; negative for a signal."""
        assert self._process is not None, "spawned"
        assert self._process.returncode is not None, "ended"
        return self._process.returncode

    async def spawn(self, start: bytes) -> None:
        """Start the process.

        Args:
            start: a `StartEngine` as one line of JSON.

        Raises:
            OSError: the system can not start another process.
            zmq.ZMQError: the socket can not be bound.
        """
        address = f"ipc://{self.path}"
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            ENGINE_MODULE,
            address,
            stdin=asyncio.subprocess.PIPE,
            env=with_visible_gpu(self._gpu),
        )
        self._ended = asyncio.create_task(self._process.wait())
        assert self._process.stdin is not None, "stdin=PIPE"
        with contextlib.suppress(ConnectionError):  # `next_message` reports a process that ended
            self._process.stdin.write(start + b"\n")
            await self._process.stdin.drain()

    async def wait_until_ready(self, on_phase: Callable[[str, float], None]) -> EngineReady:
        """Wait until the engine serves.

        Args:
            on_phase: called with each finished phase of the start and its seconds.

        Raises:
            StartupError: the engine can not start; one line that says why.
        """
        while True:
            message = await self.next_message()
            if message is None:
                raise StartupError(
                    f"the engine process ended with code {self.return_code} while starting; its "
                    "log is above"
                )
            if isinstance(message, Phase):
                on_phase(message.name, message.seconds)
            elif isinstance(message, EngineReady):
                self._is_ready = True
                return message
            elif isinstance(message, EngineFailed):
                raise StartupError(message.message)

    async def send(self, message: ClientMessage) -> None:
        """Send a message.

        Raises:
            EngineDeadError: the process has closed its socket.
        """
        message, self._grammar = without_repetition(message, self._grammar)
        # The queue has no limit, so a send could only ever wait for a peer that is gone: for ever.
        try:
            await self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDeadError("the engine ended: it closed its socket") from error

    async def next_message(self) -> EngineMessage | None:
        """The next message; None when the process has ended and all its messages were returned."""
        assert self._ended is not None, "called after spawn"
        receive = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({receive, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            # The last message of a process that ended may arrive a moment after its end. A process
            # that was killed wrote none, and its requests wait.
            if not receive.done():
                killed = self.return_code == -signal.SIGKILL
                await asyncio.wait({receive}, timeout=0.02 if killed else 0.2)
            return engine_decoder.decode(receive.result()) if receive.done() else None
        finally:
            receive.cancel()

    def kill(self) -> None:
        """Send SIGKILL to the process, if it has not ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """End the process; its last messages can still be read.

        An engine that serves is asked to end and killed after 5 s. One that starts is killed.
        """
        if self._process is not None and self._process.returncode is None:
            if self._is_ready:
                with contextlib.suppress(EngineDeadError):
                    await self.send(Shutdown())
            else:
                self._process.kill()  # it reads no messages yet and has nothing to save
            try:
                await asyncio.wait_for(self._process.wait(), _CLOSE_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def close(self) -> None:
        """End the process as `stop` does, and remove the socket. Safe to call twice."""
        await self.stop()
        if not self._socket.closed:
            self._socket.close(linger=0)
        self.path.unlink(missing_ok=True)
        flight_path(self.path).unlink(missing_ok=True)
