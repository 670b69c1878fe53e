"""Jobs for tests/runtime/test_sandbox.py: answers, and one job for each way to fail."""

from __future__ import annotations

import os
import signal
import sys
import time

from ostinato.runtime.sandbox import serve


def begin(first: bytes):
    def answer(job: bytes) -> bytes:
        if job == b"spin":
            while True:
                pass
        if job == b"work":
            end = time.process_time() + 0.6
            while time.process_time() < end:
                pass
        if job == b"sleep":
            time.sleep(600)
        if job == b"memory":
            return bytes(len(b"x" * (4 << 30)))
        if job == b"long":
            return b"x" * (2 << 20)
        if job == b"killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if job == b"raise":
            raise RuntimeError("a mistake in the child")
        if job == b"print":
            print("not an answer", flush=True)  # noqa: T201 - a test checks that this does no harm
            return b"printed"
        return first + job + str(os.getpid()).encode()

    return answer


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], begin))
