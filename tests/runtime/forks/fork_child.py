"""Jobs for tests/runtime/forks/test_fork_server.py: answers, and one job for each way to fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ostinato.runtime.forks.fork_frames import BeginPart
from ostinato.runtime.forks.serve_forks import serve_forks


def begin(first: bytes):
    if first == b"fail":
        raise RuntimeError("it cannot begin")
    if first == b"alone":
        os.fork = no_fork
    loaded = [first] * 1000

    def answer(job: bytes, begin_part: BeginPart) -> bytes:
        begin_part("first part", 0.5)
        if job in JOBS:
            return JOBS[job](begin_part)
        if job.startswith(b"j"):
            return str(len(job)).encode()
        if job.startswith(b"meet "):
            meet(job)
        loaded.append(job)  # seen by no other fork
        return b"%d %s %d %d" % (len(loaded), loaded[0], os.getpid(), os.getppid())

    return answer


def no_fork() -> int:
    raise BlockingIOError("Resource temporarily unavailable")  # as with too many processes


def meet(job: bytes) -> None:
    """Makes a file in the job's folder, and waits until the folder has the job's count of files."""
    _, count, folder = job.decode().split(" ", 2)
    (Path(folder) / str(os.getpid())).touch()
    while len(os.listdir(folder)) < int(count):
        time.sleep(0.01)


def spin(begin_part: BeginPart) -> bytes:
    begin_part("second part", 0.2)
    while True:
        pass


def native(begin_part: BeginPart) -> bytes:
    begin_part("native code", 0.2)
    return str(10**40_000_000)[:1].encode()


def parts(begin_part: BeginPart) -> bytes:
    """Runs parts that each stay within their limit of processor time, and together exceed it."""
    for number in range(4):
        begin_part(f"part {number}", 0.3)
        end = time.process_time() + 0.15
        while time.process_time() < end:
            pass
    return b"done"


def fail(begin_part: BeginPart) -> bytes:
    raise RuntimeError("a mistake in the fork")


def deep(depth: int) -> int:
    return 0 if not depth else deep(depth - 1)


JOBS: dict[bytes, Callable[[BeginPart], bytes]] = {
    b"spin": spin,
    b"native": native,
    b"parts": parts,
    b"raise": fail,
    b"sleep": lambda begin_part: bytes(time.sleep(600) or 0),
    b"memory": lambda begin_part: bytes(len(b"x" * (4 << 30))),
    b"deep": lambda begin_part: bytes(deep(10**6)),
    b"killed": lambda begin_part: bytes(os.kill(os.getpid(), signal.SIGKILL) or 0),
    b"priority": lambda begin_part: str(os.getpriority(os.PRIO_PROCESS, 0)).encode(),
    b"large": lambda begin_part: b"y" * (20 << 20),
}


if __name__ == "__main__":
    sys.exit(serve_forks(begin))
