"""Runs jobs on texts of clients in forks of one warm process, each with limits of time and memory.

A job that takes long must not hold up the event loop, nor another job, and what it has allocated
must go back. So each job has a process of its own: a fork of a server process that has loaded what
all jobs need (a tokenizer). A fork takes milliseconds, and shares the memory of what was loaded.

The parent owns a `ForkServer`, the child's main calls `serve_forks`. A job has a pair of sockets of
its own: the parent keeps one end and sends the other to the server process, which forks. Over it go
the job, then frames of the answer. When the parent closes its end, the fork ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import NamedTuple

__all__ = (
    "BeginPart",
    "FailureReason",
    "Fault",
    "ForkServer",
    "Job",
    "JobError",
    "JobLimits",
    "serve_forks",
)

_SIZE = struct.Struct("<Q")
_JOB = struct.Struct("<QQi")  # length, memory_bytes, niceness
_FRAME = struct.Struct("<BQ")  # kind, length
# Exit code of a fork, or the negative number of a signal; and how many bytes more than the server
# process a fork may have by the limit that the system sets, -1 = there is none.
_END = struct.Struct("<iq")
_CPU = struct.Struct("<d")
_READY = b"r"  # sent by the server process when it takes jobs
_NO_MEMORY, _NO_FORK = 3, 4  # exit codes; with the second one there never was a fork
_READ = 1 << 20  # bytes that are read at a time

BeginPart = Callable[[str, float], None]
"""Begins a part of a job: its name, and the seconds of processor time that it may take."""

Job = Callable[[bytes, BeginPart], bytes]
"""Called with what the parent sent, in a fork; the answer."""


class JobLimits(NamedTuple):
    """What one job may take, beside the processor time of its parts.

    `memory_bytes` counts the address space beyond what the server process has. A `niceness` above 0
    gives way to other processes.
    """

    memory_bytes: int
    niceness: int = 0


class Fault(StrEnum):
    """What is at fault when a job has no answer."""

    job = "job"  # it takes more than it may, and would do so again
    start = "start"  # no process could be started for it
    unknown = "unknown"  # its process ended; another try may succeed


class FailureReason(NamedTuple):
    """Why a job has no answer."""

    text: str  # of the job: "more than 2 s of processor time"; else a sentence without its subject
    fault: Fault


class JobError(Exception):
    """A job has ended without an answer.

    Args:
        reason: why.
        part: the part that it was in; empty = it had not begun.
    """

    def __init__(self, reason: FailureReason, part: str) -> None:
        super().__init__(reason.text)
        self.reason = reason
        self.part = part


class _Kind(IntEnum):
    """Of a frame from a fork; `ended` comes from the server process."""

    part = 0
    answer = 1
    ended = 2


class ForkServer:
    """The server process, started by the first job and again when it has ended.

    All methods run on one event loop.

    Args:
        module: run as `python -m`; its main calls `serve_forks`.
        first: what the server process gets before its first job.
    """

    def __init__(self, module: str, first: bytes) -> None:
        self._module = module
        self._first = first
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Of the server process, or None when there is none."""
        return None if self._process is None else self._process.pid

    async def call(self, job: bytes, limits: JobLimits) -> bytes:
        """The answer to a job. Cancelling the call ends the job.

        Raises:
            JobError: the job has ended without an answer.
        """
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                self._hand_over(theirs)
            loop = asyncio.get_running_loop()
            head = _JOB.pack(len(job), limits.memory_bytes, limits.niceness)
            with contextlib.suppress(OSError):  # it has ended; a frame says why
                await loop.sock_sendall(ours, head)
                await loop.sock_sendall(ours, job)
            return await self._answer(ours, limits)

    def close(self) -> None:
        """End the server process; jobs that run end when their calls are cancelled."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None

    async def _answer(self, source: socket.socket, limits: JobLimits) -> bytes:
        part, cpu_s = "", 0.0
        while True:
            try:
                kind, length = _FRAME.unpack(await _receive(source, _FRAME.size))
                data = await _receive(source, length)
            except (OSError, EOFError):
                raise JobError(self._own_end(), part) from None
            if kind == _Kind.answer:
                return data
            if kind == _Kind.ended:
                code, room = _END.unpack(data)
                raise JobError(_reason(code, room, cpu_s, limits), part)
            (cpu_s,), part = _CPU.unpack_from(data), data[_CPU.size :].decode()

    def _hand_over(self, theirs: socket.socket) -> None:
        """Give a job's socket to the server process."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        assert self._control is not None, "started"
        try:
            socket.send_fds(self._control, [b"j"], [theirs.fileno()])
        except OSError as error:
            raise JobError(self._own_end(), "") from error

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C in the terminal is not for it
                )
            except OSError as error:
                ours.close()
                text = f"can not be started ({error.strerror})"
                raise JobError(FailureReason(text, Fault.start), "") from error
        self._control = ours
        with contextlib.suppress(OSError):  # it has ended at once, which the job will show
            ours.sendall(_SIZE.pack(len(self._first)) + self._first)
        ours.setblocking(False)

    def _own_end(self) -> FailureReason:
        """Why the server process did not answer; the next job gets a new one."""
        was_ready = False
        if self._control is not None:
            with contextlib.suppress(OSError):
                was_ready = self._control.recv(1, socket.MSG_PEEK) == _READY
        self.close()
        if was_ready:
            return FailureReason("ended", Fault.unknown)
        return FailureReason("ended at its start; the server's log may say why", Fault.start)


def _reason(code: int, room: int, cpu_s: float, limits: JobLimits) -> FailureReason:
    """Why a fork ended without an answer; `room` as in `_END`."""
    if code == -signal.SIGPROF:
        return FailureReason(f"more than {cpu_s:g} s of processor time", Fault.job)
    if code == _NO_FORK:
        text = "can not be forked: the system takes no more processes"
        return FailureReason(text, Fault.start)
    if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, _NO_MEMORY):
        if 0 <= room < limits.memory_bytes:
            text = f"ran out of the {room >> 20} MiB that the limit of the system leaves it"
            return FailureReason(text, Fault.start)
        text = f"more than {limits.memory_bytes >> 20} MiB of memory or too deep a nesting"
        return FailureReason(text, Fault.job)
    name = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return FailureReason(f"ended with {name}", Fault.unknown)


async def _receive(source: socket.socket, size: int) -> bytes:
    """So many bytes; raises EOFError when fewer come."""
    loop = asyncio.get_running_loop()
    data = bytearray(size)
    view = memoryview(data)
    begin = 0
    while begin < size:
        count = await loop.sock_recv_into(source, view[begin : begin + _READ])
        if not count:
            raise EOFError
        begin += count
    return bytes(data)


def serve_forks(begin: Callable[[bytes], Job]) -> int:
    """The server process: fork for each job until the parent is gone. Returns the exit code.

    Args:
        begin: called with the parent's first message; gives the function that does a job. It may
            start no thread.
    """
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        (size,) = _SIZE.unpack(_read(control, _SIZE.size))
        first = _read(control, size)
    except (EOFError, ConnectionError):  # the parent has gone
        return 0
    job = begin(first)
    gc.collect()
    gc.freeze()  # collections in the forks need not touch, and so copy, what they share
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno())
    with contextlib.suppress(ConnectionError):  # the end of the parent is seen below
        control.sendall(_READY)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(awake, selectors.EVENT_READ)
    connections: dict[int, socket.socket] = {}  # of the forks that work, by process id
    while True:
        sources = [key.fileobj for key, _ in selector.select()]
        if awake in sources:
            awake.recv(_READ)
            _bury(connections)
        if control not in sources:
            continue
        try:
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
        except ConnectionError:  # the parent has gone, and had not read that this process is ready
            return 0
        if not message:
            return 0
        connection = socket.socket(fileno=fds[0])
        try:
            pid = os.fork()
        except OSError:
            _report_end(connection, _NO_FORK)
            continue
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (control, awake, wake, *connections.values()):
                other.close()
            _work(connection, job)
        connections[pid] = connection


def _bury(connections: dict[int, socket.socket]) -> None:
    """Take note of the forks that have ended, and tell the clients of those without an answer."""
    while connections:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        connection = connections.pop(pid)
        if code:
            _report_end(connection, code)
        else:
            connection.close()


def _report_end(connection: socket.socket, code: int) -> None:
    """Tell a client that its job has no answer."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = -1 if hard == resource.RLIM_INFINITY else max(0, hard - _address_space())
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.sendall(_FRAME.pack(_Kind.ended, _END.size) + _END.pack(code, room))


def _work(connection: socket.socket, job: Job) -> None:
    """Do one job and end this process."""
    code = 1
    try:
        size, memory_bytes, niceness = _JOB.unpack(_read(connection, _JOB.size))
        gc.disable()  # the process ends before garbage matters
        os.nice(niceness)
        data = _read(connection, size)
        _limit_memory(memory_bytes)
        threading.Thread(target=_end_with_client, args=(connection,), daemon=True).start()

        def begin_part(name: str, cpu_s: float) -> None:
            _send(connection, _Kind.part, _CPU.pack(cpu_s) + name.encode())
            # The signal ends the process at once, in native code too.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)

        _send(connection, _Kind.answer, job(data, begin_part))
        code = 0
    except MemoryError:
        code = _NO_MEMORY
    except (EOFError, ConnectionError):
        code = 0  # the client has gone
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_with_client(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)  # nothing comes but the end
    os._exit(0)


def _limit_memory(memory_bytes: int) -> None:
    limit = _address_space() + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _address_space() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _send(target: socket.socket, kind: _Kind, data: bytes) -> None:
    target.sendall(_FRAME.pack(kind, len(data)))
    target.sendall(data)


def _read(source: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = source.recv(min(size, _READ))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
