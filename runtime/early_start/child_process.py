"""`ChildProcess`: a process with a pipe to its standard input. It needs no event loop to start.

This module imports little, because the engine process is started before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence

__all__ = ("ChildProcess",)


class ChildProcess:
    """A process that this process has started, without the event loop that asyncio would need.

    Args:
        command: the program and its arguments.
        env: its environment; None = that of this process.

    Raises:
        OSError: the system cannot start it.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal.

        None until `wait`, `has_ended` or `end` has found that the process has ended.
        """
        return self._process.returncode

    def has_ended(self) -> bool:
        """Whether the process has ended. Then its pipe is closed."""
        if self._process.poll() is None:
            return False
        self._close_pipe()
        return True

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

    def end(self) -> None:
        """Kill the process, and wait for its end without an event loop."""
        self.kill()
        self._process.wait()
        self._close_pipe()

    async def wait(self) -> int:
        """Wait until the process has ended; returns the exit code. One call at a time."""
        import asyncio  # importing it takes longer than all that precedes the engine process

        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # the system has no pidfd_open
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
        self._close_pipe()
        return code

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None, "stdin=PIPE"
        with contextlib.suppress(OSError):  # the pipe holds bytes that the process did not read
            self._process.stdin.close()
