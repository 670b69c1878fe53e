"""Runs a job on untrusted text in a child process with limits of time and memory.

The child calls `serve`, the parent owns a `SandboxProcess`. Frames of bytes, each after its
length, cross standard input and output. The child sets its own limits of processor time and memory,
so that a busy machine does not count as an endless job; the parent's clock is the last resort.
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
from typing import NamedTuple

__all__ = ("FailureReason", "Limits", "SandboxError", "SandboxProcess", "call", "serve")

_LENGTH = struct.Struct("<I")


class Limits(NamedTuple):
    """What one job may take."""

    cpu_s: int
    wall_s: float  # a busy machine gives a process its processor time late
    memory_bytes: int  # address space of the process
    answer_bytes: int


class FailureReason(NamedTuple):
    """Why a job has no answer."""

    text: str  # "more than 2 s of processor time"
    is_certain: bool  # whether the job itself is at fault, so that it would happen again


class SandboxError(Exception):
    """The process ended without an answer."""

    def __init__(self, reason: FailureReason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class SandboxProcess:
    """One child; started by the first job, and again by the first after its end.

    One job at a time; `kill` and `close` may come from another thread.

    Args:
        module: run as `python -m`; its main calls `serve`.
        limits: per job; the child is told them.
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

    def call(self, job: bytes) -> bytes:
        """The answer to a job; blocks.

        Raises:
            SandboxError: the process ended, or was killed for a limit; the next job gets a new one.
        """
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._process = self._start()
        deadline = time.monotonic() + self._limits.wall_s
        try:
            _write(process, job, deadline)
            (size,) = _LENGTH.unpack(_read(process, _LENGTH.size, deadline))
            return _read(process, size, deadline)
        except TimeoutError as error:
            self.close()
            text = f"more than {self._limits.wall_s:.0f} s"
            raise SandboxError(FailureReason(text, is_certain=False)) from error
        except (OSError, EOFError):
            reason = self._reason(process)
            self.close()
            raise SandboxError(reason) from None

    def kill(self) -> None:
        """End the child at once; a job that it works on fails."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def close(self) -> None:
        """`kill`, and free everything."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, *map(str, self._limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )
        with contextlib.suppress(OSError):  # a child that is gone is seen by its first job
            _write(process, self._first, time.monotonic() + self._limits.wall_s)
        return process

    def _reason(self, process: subprocess.Popen[bytes]) -> FailureReason:
        try:
            code = process.wait(5.0)
        except subprocess.TimeoutExpired:  # it closed its output and lives on
            code = None
        limits = self._limits
        if code == -signal.SIGXCPU:
            return FailureReason(f"more than {limits.cpu_s} s of processor time", is_certain=True)
        if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, _NO_MEMORY):
            text = f"more than {limits.memory_bytes >> 20} MiB of memory or too deep a nesting"
            return FailureReason(text, is_certain=True)
        if code == _TOO_LONG:
            return _too_long(limits)
        return FailureReason(f"its process ended with code {code}", is_certain=False)


async def call(process: SandboxProcess, job: bytes) -> bytes:
    """`process.call` for an event loop; a caller that goes away kills the job."""
    task = asyncio.create_task(asyncio.to_thread(process.call, job))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        process.kill()
        with contextlib.suppress(SandboxError):
            await task
        raise


_NO_MEMORY, _TOO_LONG = 3, 4


def _too_long(limits: Limits) -> FailureReason:
    return FailureReason(f"more than {limits.answer_bytes >> 20} MiB of text", is_certain=True)


def _write(process: subprocess.Popen[bytes], frame: bytes, deadline: float) -> None:
    assert process.stdin is not None, "stdin=PIPE"
    os.set_blocking(process.stdin.fileno(), False)
    data = memoryview(_LENGTH.pack(len(frame)) + frame)
    while data:
        left = deadline - time.monotonic()
        if left <= 0 or not _is_ready(process.stdin.fileno(), select.POLLOUT, left):
            raise TimeoutError
        data = data[os.write(process.stdin.fileno(), data) :]


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
    """Waits with poll: select takes no descriptor above 1023, and a server may have as many."""
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(timeout_s * 1000))


def serve(arguments: list[str], begin: Callable[[bytes], Callable[[bytes], bytes]]) -> int:
    """The child's side: answer jobs until standard input ends. Returns the exit code.

    Args:
        arguments: of the command line, as `SandboxProcess` gave them.
        begin: called with the first frame; gives the function from job to answer. Both run on a
            thread with a small stack, so that what passes here does not overflow a larger one.
    """
    cpu_s, _, memory_bytes, answer_bytes = map(float, arguments)
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Not even to standard error may a print of the job's reach the parent's frames.
    jobs, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = 0

    def work() -> None:
        nonlocal code
        try:
            answer = begin(_next(jobs))
            while True:
                job = _next(jobs)
                _allow(int(cpu_s))
                out = answer(job)
                if len(out) > answer_bytes:
                    code = _TOO_LONG
                    return
                _write_all(answers, _LENGTH.pack(len(out)) + out)
        except EOFError:
            return
        except MemoryError:
            code = _NO_MEMORY

    threading.stack_size(1 << 20)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return code


def _allow(cpu_s: int) -> None:
    """So much processor time from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


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
