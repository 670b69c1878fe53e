"""The server process of `ForkServer` and its forks."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import selectors
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

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
    Job,
)
from ostinato.runtime.sandbox import give_way

__all__ = ("serve_forks",)


def serve_forks(begin: Callable[[bytes], Job]) -> int:
    """Run the server process: fork for each socket from the parent. Returns the exit code.

    The call returns when the parent has ended.

    Args:
        begin: called with the parent's first message; returns the function that does a job. It
            must not start a thread.
    """
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        (size,) = SIZE.unpack(_read(control, SIZE.size))
        first = _read(control, size)
    except (EOFError, ConnectionError):  # the parent has ended
        return 0
    job = begin(first)
    gc.collect()
    gc.freeze()  # without it, a collection in a fork would write to shared pages and copy them
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno())
    with contextlib.suppress(ConnectionError):  # if the parent has ended, the loop below returns
        control.sendall(READY)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(awake, selectors.EVENT_READ)
    connections: dict[int, socket.socket] = {}  # connections to the running forks, by process id
    while True:
        sources = [key.fileobj for key, _ in selector.select()]
        if awake in sources:
            awake.recv(READ_BYTES)
            _reap(connections)
        if control not in sources:
            continue
        try:
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
        except ConnectionError:  # the parent ended before it read READY
            return 0
        if not message:
            return 0
        connection = socket.socket(fileno=fds[0])
        try:
            pid = os.fork()
        except OSError:
            _report_end(connection, NO_FORK)
            continue
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (control, awake, wake, *connections.values()):
                other.close()
            _work(connection, job)
        connections[pid] = connection


def _reap(connections: dict[int, socket.socket]) -> None:
    """Reap the forks that have ended. Tell the parent which of them ended without an answer."""
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
    """Report to the parent that a job has no answer."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = -1 if hard == resource.RLIM_INFINITY else max(0, hard - _address_space())
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.sendall(FRAME.pack(FrameKind.ended, END.size) + END.pack(code, room))


def _work(connection: socket.socket, job: Job) -> None:
    """Do the fork's job, or its jobs if they are shared. Then end the process."""

    def begin_part(name: str, cpu_s: float) -> None:
        _send(connection, FrameKind.part, CPU_SECONDS.pack(cpu_s) + name.encode())
        # The signal ends the process at once, in native code too.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)

    code = 1
    try:
        gc.disable()  # a collection would delay the answer
        threading.Thread(target=_end_with_client, args=(connection,), daemon=True).start()
        is_shared = True
        while is_shared:
            head = _read(connection, JOB.size)
            size, memory_bytes, niceness, is_shared = JOB.unpack(head)
            if niceness:
                give_way(niceness)
            data = _read(connection, size)
            _limit_memory(memory_bytes)
            answer = job(data, begin_part)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(connection, FrameKind.answer, answer)
            if is_shared:
                del data, answer
                gc.collect()
        code = 0
    except MemoryError:
        code = NO_MEMORY
    except (EOFError, ConnectionError):
        code = 0  # the parent has closed the connection
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_with_client(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()  # returns when the parent closes its end
    os._exit(0)


def _limit_memory(memory_bytes: int) -> None:
    limit = _address_space() + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _address_space() -> int:
    """The size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _send(target: socket.socket, kind: FrameKind, data: bytes) -> None:
    target.sendall(FRAME.pack(kind, len(data)))
    target.sendall(data)


def _read(source: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = source.recv(min(size, READ_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
