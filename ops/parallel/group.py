"""The group of processes that compute one model together: a shared memory segment and its ranks.

The leader makes the segment (`create_segment`) and passes its file descriptor to the processes of
the other ranks. The segment has no name, so it disappears with the last process that has it.
ops/native/collectives/group.h describes its contents.
"""

from __future__ import annotations

import ctypes
import os
import struct

from ostinato.ops.native.library import core_library

__all__ = ("MAX_RANKS", "ParallelGroup", "create_segment")

MAX_RANKS = 32
_MAGIC = 0x6F737469
_HEADER = struct.Struct("=III")  # magic, ranks, bytes of a slot
_HEADER_BYTES = 4096
# The two slots of every rank stay in the processor's second level cache.
_SLOT_BYTES = 1 << 18
_LONGEST_WAIT_S = 1e6


def create_segment(world: int) -> int:
    """Make the shared memory of a group.

    Its size depends on the number of ranks only. Larger values are exchanged in pieces.

    Args:
        world: ranks of the group, 1 to MAX_RANKS.

    Returns:
        A file descriptor that a new process does not inherit unless it is passed. The caller closes
        it.

    Raises:
        ValueError: `world` is out of range.
        OSError: the system gives no memory.
    """
    if not 1 <= world <= MAX_RANKS:
        raise ValueError(f"a group has 1 to {MAX_RANKS} ranks, got {world}")
    fd = os.memfd_create("ostinato-group", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _segment_bytes(world))
        os.pwrite(fd, _HEADER.pack(_MAGIC, world, _SLOT_BYTES), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


class ParallelGroup:
    """One rank's membership in a group.

    All ranks must call the same collectives in the same order. One thread of a process calls them;
    `abort` may be called from any thread.

    Attributes:
        rank: 0 to world - 1.
        world: ranks of the group.
        handle: what the `group` argument of the ops of collectives.py holds.
    """

    def __init__(
        self, fd: int, rank: int, world: int, *, spin_us: int = 50, timeout_s: float = 60.0
    ) -> None:
        """Map the segment; the file descriptor may be closed afterwards. Loads the CPU kernels.

        Args:
            fd: from `create_segment`, of this or another process.
            rank: the rank of this process.
            world: ranks of the group.
            spin_us: microseconds for which a waiting rank spins before it sleeps; 0 if ranks share
                a processor.
            timeout_s: a wait that takes longer ends the group.

        Raises:
            ValueError: the descriptor is not that of a group of `world` ranks, or there is no such
                rank.
            OSError: the system does not map the segment.
            NativeBuildError: the kernels cannot be built on this machine.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not in a group of {world}")
        size, expected = os.fstat(fd).st_size, _segment_bytes(world)
        if size != expected or os.pread(fd, _HEADER.size, 0) != _HEADER.pack(
            _MAGIC, world, _SLOT_BYTES
        ):
            raise ValueError(f"file descriptor {fd} is not the segment of a group of {world} ranks")
        self.rank, self.world = rank, world
        self._library = core_library()
        self._library.ostinato_group_open.restype = ctypes.c_void_p
        self.handle: int = (
            self._library.ostinato_group_open(
                fd,
                ctypes.c_int64(size),
                rank,
                ctypes.c_int64(spin_us),
                ctypes.c_int64(int(min(timeout_s, _LONGEST_WAIT_S) * 1000)),
            )
            or 0
        )
        if not self.handle:
            raise OSError(f"{size} bytes of shared memory cannot be mapped for a group of ranks")

    def abort(self) -> None:
        """End all present and later collectives of all ranks with an error; from any thread."""
        self._library.ostinato_group_abort(ctypes.c_void_p(self.handle))

    def close(self) -> None:
        """Unmap the segment. No collective and no `abort` may follow."""
        handle, self.handle = self.handle, 0
        if handle:
            self._library.ostinato_group_close(ctypes.c_void_p(handle))


def _segment_bytes(world: int) -> int:
    return _HEADER_BYTES + world * 2 * _SLOT_BYTES
