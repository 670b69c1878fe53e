"""Runs a job on untrusted text in a child process with limits of time and memory.

The child calls `serve`. The parent owns a `SandboxProcess`. They exchange frames over standard
input and output. A frame is a length, then that many bytes. The child's first frame is empty and
says that the child is ready. The child limits its own memory and processor time. Time in which the
child waits for a processor does not count. The parent ends a job after `Limits.wall_s` seconds in
any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

__all__ = (
    "FailureReason",
    "Fault",
    "Limits",
    "SandboxError",
    "SandboxProcess",
    "call",
    "give_way",
    "serve",
)

_LENGTH = struct.Struct("<I")


class Limits(NamedTuple):
    """Limits of one job."""

    cpu_s: int  # seconds of processor time
    wall_s: float  # much more than cpu_s, because a busy machine delays the process
    memory_bytes: int  # address space of the process
    answer_bytes: int


class Fault(StrEnum):
    """The cause of a job without an answer."""

    job = "job"  # the job exceeds a limit; another try would fail too
    start = "start"  # no process could be started for it, or the system leaves it too little memory
    unknown = "unknown"  # any other cause; another try can succeed


class FailureReason(NamedTuple):
    """Why a job has no answer."""

    text: str  # such as "more than 2 s of processor time" or "ended with signal 9"
    fault: Fault


class SandboxError(Exception):
    """A job has no answer."""

    def __init__(self, reason: FailureReason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class SandboxProcess:
    """One child process. A job starts it when it does not run.

    It takes one job at a time. `kill` and `close` may be called on another thread.

    Args:
        module: run as `python -m`; its main calls `serve`.
        limits: the limits of each job, which the child gets as arguments.
        first: a frame that every new child gets before its first job.
    """

    def __init__(self, module: str, limits: Limits, first: bytes = b"") -> None:
        self._module = module
        self._limits = limits
        self._first = first
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, or None when there is none."""
        return None if self._process is None else self._process.pid

    def call(self, job: bytes, abandoned: threading.Event | None = None) -> bytes:
        """The answer to a job; blocks.

        Args:
            job: the child gets it as one frame.
            abandoned: set on another thread when the answer is no longer wanted, before `kill` is
                called there. A job that is not sent by then is never sent.

        Raises:
            SandboxError: the process ended or exceeded a limit, or the job was abandoned. The next
                job starts a new process if none runs.
        """
        process = self._process
        deadline = time.monotonic() + self._limits.wall_s
        if process is None or process.poll() is not None:
            self.close()
            process = self._start(deadline)
            deadline = time.monotonic() + self._limits.wall_s
        # If the event is set later than this line, `kill` finds the process and ends it.
        if abandoned is not None and abandoned.is_set():
            self.close()  # `kill` may be ending it: the next job must not be sent to this child
            raise SandboxError(FailureReason("was not sent: it is abandoned", Fault.unknown))
        try:
            _write(process, job, deadline)
            return _read_frame(process, deadline)
        except TimeoutError as error:
            self.close()
            text = f"gave no answer within {self._limits.wall_s:.0f} s"
            raise SandboxError(FailureReason(text, Fault.unknown)) from error
        except (OSError, EOFError):
            reason = self._reason(process)
            self.close()
            raise SandboxError(reason) from None

    def kill(self) -> None:
        """End the child at once. Its running job fails."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def close(self) -> None:
        """End the child, wait for its end, and close its pipes."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self, deadline: float) -> subprocess.Popen[bytes]:
        """A new child that is ready for jobs.

        Raises:
            SandboxError: the child could not be started, or was not ready in time.
        """
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, *map(str, self._limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # a Ctrl-C in the terminal must not end it
            )
        except OSError as error:
            text = f"cannot be started ({error.strerror})"
            raise SandboxError(FailureReason(text, Fault.start)) from error
        try:
            _write(process, self._first, deadline)
            _read_frame(process, deadline)
        except TimeoutError as error:
            self.close()
            text = f"did not start within {self._limits.wall_s:.0f} s"
            raise SandboxError(FailureReason(text, Fault.start)) from error
        except (OSError, EOFError):
            code = _exit_code(process)
            self.close()
            text = f"{_end_of(code)} at its start"
            raise SandboxError(FailureReason(text, Fault.start)) from None
        return process

    def _reason(self, process: subprocess.Popen[bytes]) -> FailureReason:
        """Why a child that was ready ended without an answer."""
        code, limits = _exit_code(process), self._limits
        if code == -signal.SIGXCPU:
            return FailureReason(f"more than {limits.cpu_s} s of processor time", Fault.job)
        if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, _NO_MEMORY):
            own, _ = resource.getrlimit(resource.RLIMIT_AS)
            if own != resource.RLIM_INFINITY and own < limits.memory_bytes:
                text = f"ran out of the {own >> 20} MiB that the server's processes may have"
                return FailureReason(text, Fault.start)
            text = (
                f"more than {limits.memory_bytes >> 20} MiB of memory, or it is nested too deeply"
            )
            return FailureReason(text, Fault.job)
        if code == _TOO_LONG:
            return FailureReason(f"more than {limits.answer_bytes >> 20} MiB of text", Fault.job)
        return FailureReason(_end_of(code), Fault.unknown)


async def call(process: SandboxProcess, job: bytes) -> bytes:
    """`process.call` for an event loop; cancelling the call kills the child."""
    abandoned = threading.Event()
    task = asyncio.create_task(asyncio.to_thread(process.call, job, abandoned))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        abandoned.set()
        process.kill()
        with contextlib.suppress(SandboxError):
            await task
        raise


_NO_MEMORY, _TOO_LONG = 3, 4


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The child's exit code; None if it closed its output and still runs."""
    try:
        return process.wait(60.0)
    except subprocess.TimeoutExpired:
        return None


def _end_of(code: int | None) -> str:
    if code is None:
        return "closed its output"
    return f"ended with exit code {code}" if code >= 0 else f"ended with signal {-code}"


def _write(process: subprocess.Popen[bytes], frame: bytes, deadline: float) -> None:
    assert process.stdin is not None, "stdin=PIPE"
    os.set_blocking(process.stdin.fileno(), False)
    data = memoryview(_LENGTH.pack(len(frame)) + frame)
    while data:
        left = deadline - time.monotonic()
        if left <= 0 or not _is_ready(process.stdin.fileno(), select.POLLOUT, left):
            raise TimeoutError
        data = data[os.write(process.stdin.fileno(), data) :]


def _read_frame(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    (size,) = _LENGTH.unpack(_read(process, _LENGTH.size, deadline))
    return _read(process, size, deadline)


def _read(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert process.stdout is not None, "stdout=PIPE"
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not _is_ready(process.stdout.fileno(), select.POLLIN, left):
            raise TimeoutError
        part = os.read(process.stdout.fileno(), min(1 << 20, size - len(data)))
        if not part:
            raise EOFError
        data += part
    return data


def _is_ready(descriptor: int, events: int, timeout_s: float) -> bool:
    """Wait with poll. `select` takes no descriptor above 1023, but a server can have some."""
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(timeout_s * 1000))


def serve(arguments: list[str], begin: Callable[[bytes], Callable[[bytes], bytes]]) -> int:
    """Answer jobs in the child until standard input ends. Returns the exit code.

    Args:
        arguments: the command line's arguments, as `SandboxProcess` gave them.
        begin: called with the first frame; returns the function from job to answer. Both functions
            run on a thread with a small stack. So a text that nests too deeply for a small stack
            fails here. It cannot overflow the larger stack of another process later.
    """
    cpu_s, _, memory_bytes, answer_bytes = map(float, arguments)
    _limit(resource.RLIMIT_AS, int(memory_bytes))
    _limit(resource.RLIMIT_CORE, 0)
    # What a job prints must not mix with the frames to the parent.
    jobs, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = 1  # the exit code if the thread ends with an error

    def work() -> None:
        nonlocal code
        try:
            answer = begin(_next(jobs))
            _write_all(answers, _LENGTH.pack(0))
            while True:
                job = _next(jobs)
                _allow(int(cpu_s))
                out = answer(job)
                if len(out) > answer_bytes:
                    code = _TOO_LONG
                    return
                _write_all(answers, _LENGTH.pack(len(out)) + out)
        except EOFError:
            code = 0
        except MemoryError:
            code = _NO_MEMORY

    threading.stack_size(1 << 20)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return code


def _allow(cpu_s: int) -> None:
    """Let this process use `cpu_s` more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu_s)


def _limit(what: int, value: int) -> None:
    """Set a soft limit of this process. The hard limit caps the value."""
    _, hard = resource.getrlimit(what)
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (soft, hard))


def _next(jobs: int) -> bytes:
    (size,) = _LENGTH.unpack(_read_all(jobs, _LENGTH.size))
    return _read_all(jobs, size)


def _read_all(source: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(source, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write_all(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def give_way(niceness: int) -> None:
    """Lower the priority of this process, also against processes of other sessions.

    Linux shares the processor among sessions first (sched_autogroup), and `nice` counts only within
    one session. So the process gets a session of its own, and that session gets the niceness too.
    """
    os.nice(niceness)
    with contextlib.suppress(OSError):  # without autogroups the file does not exist
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(niceness))
