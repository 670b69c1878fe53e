"""Runs jobs on clients' texts (templates, tokenizing) in forks of a process with a tokenizer.

A slow job must not delay the event loop or another job, and its memory must return to the system.
So each job has limits of time and memory, and runs in a process of its own. That process is a fork
of a server process, which has loaded the tokenizer. A fork takes milliseconds and shares the loaded
memory.

A short job spends most of its time on the fork and on page faults. So one fork may do several short
jobs, one after another, if the parent marks them as `is_shared`.

The parent owns a `ForkServer`. The main of the server process calls `serve_forks`
(serve_forks.py). Each fork has a socket pair of its own. The parent keeps one end and sends the
other end to the server process, which then forks. The sockets carry the job, then frames of the
answer. When the parent closes its end, the fork ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ostinato.conf.environment import environment_with
from ostinato.runtime.forks.fork_frames import (
    CPU_SECONDS,
    END,
    FRAME,
    JOB,
    NO_FORK,
    NO_MEMORY,
    READ_BYTES,
    READY,
    SIZE,
    FrameKind,
)
from ostinato.runtime.sandbox import FailureReason, Fault

__all__ = ("ForkServer", "JobError", "JobLimits")

_MOST_IDLE = 4  # forks that wait for a further job
_MOST_JOBS = 256  # a fork ends after this many jobs, so that its memory stays bounded

_Parts = bytes | Sequence[bytes | bytearray]


class JobLimits(NamedTuple):
    """Limits of one job, besides the processor time of its parts.

    Attributes:
        memory_bytes: address space beyond what the process has before the job.
        niceness: above 0, the job gives way to other processes and to other jobs.
        is_shared: the job may run in a fork that has done other jobs, and the fork may do further
            jobs afterwards. Such a job needs `niceness` 0, because later jobs in the fork would get
            its priority too. It must leave nothing in the process that later jobs could read.
    """

    memory_bytes: int
    niceness: int = 0
    is_shared: bool = False


class JobError(Exception):
    """A job has ended without an answer.

    Args:
        reason: the cause of the end.
        part: name of the part that had begun last; empty = none.
    """

    def __init__(self, reason: FailureReason, part: str) -> None:
        super().__init__(reason.text)
        self.reason = reason
        self.part = part


class _Fork(NamedTuple):
    """A fork that can do a job."""

    connection: socket.socket
    num_jobs: int  # jobs that the fork has done


class ForkServer:
    """The server process. `start` or a job starts it if it does not run.

    All methods run on one event loop.

    Args:
        module: run as `python -m`; its main calls `serve_forks`.
        first: makes the message that the server process gets before its first job.
    """

    def __init__(self, module: str, first: Callable[[], bytes]) -> None:
        self._module = module
        self._first = first
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._has_first = False  # the process has got its first message
        self._idle: list[_Fork] = []  # the most recently used fork is the last

    @property
    def pid(self) -> int | None:
        """The id of the server process, or None when there is none."""
        return None if self._process is None else self._process.pid

    def launch(self) -> None:
        """Launch the server process if it does not run. It imports its modules and then waits.

        So it can do so before the first message is known.

        Raises:
            JobError: the process cannot be started.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._spawn()

    def start(self) -> None:
        """Make the server process ready for jobs, so that the first job does not wait for it.

        Raises:
            JobError: the process cannot be started.
        """
        self.launch()
        if self._has_first:
            return
        self._has_first = True
        assert self._control is not None, "launched"
        first = self._first()
        self._control.setblocking(True)
        with contextlib.suppress(OSError):  # if the process has ended, the job's `call` raises
            self._control.sendall(SIZE.pack(len(first)) + first)
        self._control.setblocking(False)

    async def call(self, job: _Parts, limits: JobLimits) -> bytearray:
        """The answer to a job, given whole or in parts. Cancelling the call ends the job.

        Raises:
            JobError: the job has ended without an answer.
        """
        if limits.is_shared and self._idle:
            try:
                return await self._call(self._idle.pop(), job, limits)
            except JobError as error:
                # The fork may have been killed while it waited for a job. Then the job is not the
                # cause. The other waiting forks may be dead too, so the job gets a new fork.
                if error.reason.fault is not Fault.unknown:
                    raise
        return await self._call(_Fork(self._fork(), 0), job, limits)

    async def _call(self, fork: _Fork, job: _Parts, limits: JobLimits) -> bytearray:
        """Have a fork do a job. Keep the fork for further jobs if the job is shared."""
        connection, num_jobs = fork
        stays = False
        try:
            loop = asyncio.get_running_loop()
            parts = [job] if isinstance(job, bytes) else job
            head = JOB.pack(sum(map(len, parts)), *limits)
            with contextlib.suppress(OSError):  # if the fork has ended, a frame says why
                for part in (head, *parts):
                    await loop.sock_sendall(connection, part)
            answer = await self._answer(connection, limits)
            num_jobs += 1
            stays = limits.is_shared and len(self._idle) < _MOST_IDLE and num_jobs < _MOST_JOBS
            return answer
        finally:
            if stays:
                self._idle.append(_Fork(connection, num_jobs))
            else:
                connection.close()

    def close(self) -> None:
        """End the server process. A running job ends when its call is cancelled."""
        for fork in self._idle:
            fork.connection.close()
        self._idle.clear()
        self._has_first = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None

    async def _answer(self, source: socket.socket, limits: JobLimits) -> bytearray:
        part, cpu_s = "", 0.0
        while True:
            try:
                kind, length = FRAME.unpack(await _receive(source, FRAME.size))
                data = await _receive(source, length)
            except (OSError, EOFError):
                raise JobError(self._own_end(), part) from None
            if kind == FrameKind.answer:
                return data
            if kind == FrameKind.ended:
                code, room = END.unpack(data)
                raise JobError(_reason(code, room, cpu_s, limits), part)
            (cpu_s,), part = CPU_SECONDS.unpack_from(data), data[CPU_SECONDS.size :].decode()

    def _fork(self) -> socket.socket:
        """The connection to a new fork."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self._hand_over(theirs)
        except BaseException:
            ours.close()
            raise
        return ours

    def _hand_over(self, theirs: socket.socket) -> None:
        """Give a fork's socket to the server process, which forks."""
        self.start()
        assert self._control is not None, "started"
        try:
            socket.send_fds(self._control, [b"j"], [theirs.fileno()])
        except OSError as error:
            raise JobError(self._own_end(), "") from error

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=environment_with(OPENBLAS_NUM_THREADS="1"),  # forks would lack its threads
                    start_new_session=True,  # a Ctrl-C in the terminal must not end it
                )
            except OSError as error:
                ours.close()
                text = f"cannot be started ({error.strerror})"
                raise JobError(FailureReason(text, Fault.start), "") from error
        self._control = ours

    def _own_end(self) -> FailureReason:
        """Close the server process and return why it did not answer.

        The next job starts a new server process.
        """
        was_ready = False
        if self._control is not None:
            with contextlib.suppress(OSError):
                was_ready = self._control.recv(1, socket.MSG_PEEK) == READY
        self.close()
        if was_ready:
            return FailureReason("ended", Fault.unknown)
        return FailureReason("ended at its start; the server's log may say why", Fault.start)


def _reason(code: int, room: int, cpu_s: float, limits: JobLimits) -> FailureReason:
    """Why a fork ended without an answer; `code` and `room` are the fields of `END`."""
    if code == -signal.SIGPROF:
        return FailureReason(f"more than {cpu_s:g} s of processor time", Fault.job)
    if code == NO_FORK:
        text = "cannot be forked: the system allows no more processes"
        return FailureReason(text, Fault.start)
    if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, NO_MEMORY):
        if 0 <= room < limits.memory_bytes:
            text = f"ran out of the {room >> 20} MiB that the limit of the system leaves it"
            return FailureReason(text, Fault.start)
        text = f"more than {limits.memory_bytes >> 20} MiB of memory, or it is nested too deeply"
        return FailureReason(text, Fault.job)
    name = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return FailureReason(f"ended with {name}", Fault.unknown)


async def _receive(source: socket.socket, size: int) -> bytearray:
    """Read exactly `size` bytes; raises EOFError if the source ends earlier."""
    loop = asyncio.get_running_loop()
    data = bytearray()  # it grows: clearing or copying much memory at once would block the loop
    while len(data) < size:
        part = await loop.sock_recv(source, min(size - len(data), READ_BYTES))
        if not part:
            raise EOFError
        data += part
    return data
