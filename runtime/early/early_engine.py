"""`EarlyEngine`: an engine process that is started before its configuration is known.

It imports torch while this process reads the configuration. A start of the server has two
processes, so both cores of a small machine are busy from the beginning. Imports little itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import Self

__all__ = ("AdoptedProcess", "EarlyEngine")

_MODULE = "ostinato.runtime.process.engine_main"


class EarlyEngine:
    """Starts an engine process, and ends it at the end of a `with` block if it was not taken."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        # If the system cannot start it now, the later start reports that.
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen([sys.executable, "-m", _MODULE], stdin=subprocess.PIPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def take(self) -> AdoptedProcess | None:
        """The process; the caller ends it. None if it was taken or closed before, or has ended."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is not None:
            _close_pipe(process)
            return None
        return AdoptedProcess(process)

    def close(self) -> None:
        """End the process, unless it was taken. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close_pipe(process)


class AdoptedProcess:
    """A running process with a pipe to its standard input, for use on an event loop.

    It has the part of `asyncio.subprocess.Process` that `LocalChild` uses.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None before `wait` has returned."""
        return self._process.returncode

    def write(self, data: bytes) -> None:
        """Write to the standard input, which stays open.

        Raises:
            BrokenPipeError: the process has ended.
        """
        assert self._process.stdin is not None, "stdin=PIPE"
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def kill(self) -> None:
        """Send SIGKILL to the process, if it has not ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait until the process has ended; returns the exit code. One call at a time."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or a kernel that does not have the call
            code = await asyncio.to_thread(self._process.wait)
        else:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
            code = self._process.wait()
        _close_pipe(self._process)
        return code


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "stdin=PIPE"
    with contextlib.suppress(OSError):  # it holds bytes that the process did not read
        process.stdin.close()
