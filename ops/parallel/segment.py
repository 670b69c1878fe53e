"""The shared memory of a group of ranks, and how ranks on other machines take part in it.

ops/native/collectives/group.h has the layout, and the rule by which ranks write and read.

This module imports no torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import threading

__all__ = ("MAX_RANKS", "SegmentMirror", "check_segment", "create_segment")

MAX_RANKS = 32
_MAGIC = 0x6F737469
_HEADER = struct.Struct("=III")  # magic, ranks, bytes of a slot
_HEADER_BYTES = 4096
# The two slots of every rank stay in the processor's second level cache.
_SLOT_BYTES = 1 << 18
_FIRST_RANK, _RANK_BYTES, _PIECE_BYTES = 128, 64, 8  # places in the header
_NUMBERS = 1 << 32  # numbers of pieces wrap around
_FUTEX = {"x86_64": 202, "aarch64": 98}  # number of the system call
_FUTEX_WAKE, _ALL = 1, (1 << 31) - 1


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


def check_segment(fd: int, world: int) -> int:
    """The size in bytes of a segment, which must be that of a group of `world` ranks.

    Raises:
        ValueError: the descriptor is not that of such a segment.
    """
    size = os.fstat(fd).st_size
    if size != _segment_bytes(world) or os.pread(fd, _HEADER.size, 0) != _HEADER.pack(
        _MAGIC, world, _SLOT_BYTES
    ):
        raise ValueError(f"file descriptor {fd} is not the segment of a group of {world} ranks")
    return size


class SegmentMirror:
    """Takes the pieces of this machine's ranks from a segment, and puts in those of other ranks.

    At most two pieces of a rank wait to be taken, each in a slot of its own. A rank writes a third
    piece only after it has read the pieces of the other ranks that belong to its first.
    """

    def __init__(self, fd: int, world: int) -> None:
        """Map the segment; the file descriptor may be closed afterwards.

        Args:
            fd: from `create_segment`.
            world: ranks of the group.

        Raises:
            ValueError: the descriptor is not that of a group of `world` ranks.
            OSError: the system does not map the segment, or the processor is neither x86_64 nor
                aarch64.
        """
        size = check_segment(fd, world)
        machine = platform.machine()
        if machine not in _FUTEX:
            raise OSError(f"ranks on several machines need x86_64 or aarch64, not {machine}")
        self._system_call, self._futex = ctypes.CDLL(None).syscall, _FUTEX[machine]
        self._map = mmap.mmap(fd, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._words = memoryview(self._map).cast("I")
        self._taken = [0] * world  # number of the last piece of each rank
        self._order = threading.Lock()

    def take(self, rank: int) -> list[bytes]:
        """The pieces that a rank of this machine has written since the last call."""
        first = self._rank_at(rank)
        published = self._words[first // 4]
        pieces: list[bytes] = []
        while self._taken[rank] != published:
            number = self._taken[rank] = (self._taken[rank] + 1) % _NUMBERS
            num_bytes = self._words[(first + _PIECE_BYTES) // 4 + (number & 1)]
            begin = self._slot_at(rank, number)
            pieces.append(self._map[begin : begin + num_bytes])
        return pieces

    def put(self, rank: int, piece: bytes) -> None:
        """Write the next piece of a rank on another machine, and wake the ranks that wait for it.

        Raises:
            ValueError: the piece is larger than a slot.
        """
        if len(piece) > _SLOT_BYTES:
            raise ValueError(f"a piece of {len(piece)} bytes does not fit into {_SLOT_BYTES}")
        number = self._taken[rank] = (self._taken[rank] + 1) % _NUMBERS
        begin = self._slot_at(rank, number)
        self._map[begin : begin + len(piece)] = piece
        # The piece must be in memory before its number. A lock that is taken again after it was
        # released orders the two, also on processors that reorder stores.
        for _ in range(2):
            with self._order:
                pass
        first = self._rank_at(rank)
        self._words[first // 4] = number
        address = ctypes.c_void_p(self._address + first)
        self._system_call(self._futex, address, _FUTEX_WAKE, _ALL, None, None, 0)

    @staticmethod
    def _rank_at(rank: int) -> int:
        return _FIRST_RANK + rank * _RANK_BYTES

    @staticmethod
    def _slot_at(rank: int, number: int) -> int:
        return _HEADER_BYTES + (2 * rank + (number & 1)) * _SLOT_BYTES


def _segment_bytes(world: int) -> int:
    return _HEADER_BYTES + world * 2 * _SLOT_BYTES
