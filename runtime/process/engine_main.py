"""The entry of an engine process: `python -m ostinato.runtime.process.engine_main [ADDRESS]`.

It ignores the signals that its client handles, lets a thread read torch's library, and calls
`run_engine`. It imports little before that, so that the thread begins early.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from ostinato.runtime.early_start.torch_import import begin_reading

__all__ = ("main",)

# Modules of `run_engine` that are libraries, or import some. An import of a library waits until the
# thread has read torch's library, so these are imported before.
_LIBRARIES = (
    "array",
    "binascii",
    "csv",
    "fcntl",
    "hashlib",
    "heapq",
    "mmap",
    "msgspec",
    "queue",
    "select",
    "subprocess",
    "zmq",
)


def main(arguments: Sequence[str]) -> int:
    """Run the engine; returns the exit code.

    Args:
        arguments: the address of the client's socket; empty = it is the first line of the standard
            input.
    """
    # A terminal's Ctrl-C and a supervisor's SIGTERM go to the whole process group. They are ignored
    # here, because the client lets requests finish before it ends the engine.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for name in _LIBRARIES:
        import_module(name)
    begin_reading()
    from ostinato.runtime.process.engine_loop import run_engine

    return run_engine(arguments[0] if arguments else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
