"""The messages between `ForkServer`, its server process and the forks, over sockets."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

__all__ = (
    "CPU_SECONDS",
    "END",
    "FRAME",
    "JOB",
    "NO_FORK",
    "NO_MEMORY",
    "READY",
    "READ_BYTES",
    "SIZE",
    "BeginPart",
    "FrameKind",
    "Job",
)

SIZE = struct.Struct("<Q")
JOB = struct.Struct("<QQi?")  # length, memory_bytes, niceness, is_shared
FRAME = struct.Struct("<BQ")  # kind, length
# Two fields. The first is the exit code of a fork, or the negative number of a signal. The second
# is how many bytes of address space the system's limit leaves to a fork; -1 = no limit.
END = struct.Struct("<iq")
CPU_SECONDS = struct.Struct("<d")
READY = b"r"  # sent by the server process when it is ready for jobs
NO_MEMORY, NO_FORK = 3, 4  # exit codes; NO_FORK: the call of fork failed
READ_BYTES = 1 << 20  # bytes that are read at a time

BeginPart = Callable[[str, float], None]
"""Called by a job when a part of it begins: the part's name, its limit of processor seconds."""

Job = Callable[[bytes, BeginPart], bytes]
"""Does one job in a fork: gets the bytes that the parent sent, returns the answer."""


class FrameKind(IntEnum):
    """The kind of a frame from a fork; the server process sends `ended`."""

    part = 0
    answer = 1
    ended = 2
