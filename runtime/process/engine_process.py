"""Starts and ends one engine process, and exchanges messages with it. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from ostinato.runtime.errors import EngineDeadError, StartupError
from ostinato.runtime.process.engine_child import EngineChild
from ostinato.runtime.process.ipc import (
    ClientMessage,
    EngineFailed,
    EngineMessage,
    EngineReady,
    LastParts,
    Phase,
    Shutdown,
    detach_data,
    encoder,
    engine_decoder,
    without_repetition,
)

__all__ = ("EngineProcess",)

_CLOSE_S = 5.0  # how long a closing engine process gets before it is killed


class EngineProcess:
    """One engine process and its messages. `spawn` starts it once, `stop` or `close` ends it.

    Args:
        child: the process, which has not been spawned.
    """

    def __init__(self, child: EngineChild) -> None:
        self._child = child
        self._encoder = encoder()
        self._last = LastParts()  # the large parts that were sent last
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """The process id; None before `spawn`."""
        return self._child.pid

    @property
    def node(self) -> str | None:
        """The name of the other machine that the process runs on; None = this machine."""
        return self._child.node

    @property
    def path(self) -> Path:
        """Path of the socket's file. The flight recorder's file lies in the same directory."""
        return self._child.path

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all threads of the process in seconds; 0 if there is no process."""
        return self._child.cpu_seconds

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped, as by SIGSTOP."""
        return self._child.is_stopped

    @property
    def return_code(self) -> int:
        """The exit code of the process; negative for a signal. The process must have ended."""
        code = self._child.return_code
        assert code is not None, "ended"
        return code

    async def spawn(self, start: bytes) -> None:
        """Start the process.

        Args:
            start: a `StartEngine` as one line of JSON.

        Raises:
            OSError: the system cannot start another process.
            zmq.ZMQError: the socket cannot be bound.
        """
        await self._child.spawn(start)

    async def wait_until_ready(self, on_phase: Callable[[str, float], None]) -> EngineReady:
        """Wait until the engine serves.

        Args:
            on_phase: called with each finished phase of the start and its seconds.

        Raises:
            StartupError: the engine cannot start; the message is one line.
        """
        while True:
            message = await self.next_message()
            if message is None:
                raise StartupError(
                    f"the engine process ended with code {self.return_code} while starting; see "
                    "its log"
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
        message, self._last = without_repetition(message, self._last)
        message, data = detach_data(message)
        await self._child.send([self._encoder.encode(message), *data])

    async def next_message(self) -> EngineMessage | None:
        """The next message; None when the process has ended and all its messages were returned."""
        data = await self._child.receive()
        return None if data is None else engine_decoder.decode(data)

    def kill(self) -> None:
        """Send SIGKILL to the process, if it has not ended."""
        self._child.kill()

    async def stop(self) -> None:
        """End the process. Its last messages can still be read.

        An engine that serves is asked to end, and is killed after 5 s. An engine that is still
        starting is killed at once.
        """
        if self._child.return_code is not None:
            return
        if self._is_ready:
            with contextlib.suppress(EngineDeadError):
                await self.send(Shutdown())
        else:
            self._child.kill()  # an engine that is starting reads no messages
        try:
            await asyncio.wait_for(self._child.wait(), _CLOSE_S)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()

    async def close(self) -> None:
        """End the process as `stop` does, and remove its files. Safe to call twice."""
        await self.stop()
        self._child.close()
