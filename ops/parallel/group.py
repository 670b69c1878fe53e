"""The group of processes that compute one model together: a shared memory segment and its ranks.

One process makes the segment (segment.py) and passes its file descriptor to the processes of
the ranks. The segment has no name, so it disappears with the last process that has it.
ops/native/collectives/group.h describes its contents.
"""

from __future__ import annotations

import ctypes

from ostinato.ops.native.library import load
from ostinato.ops.parallel.segment import check_segment

__all__ = ("ParallelGroup",)

_LONGEST_WAIT_S = 1e6


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
        self,
        fd: int,
        rank: int,
        world: int,
        *,
        spin_us: int = 50,
        timeout_s: float = 60.0,
        notify: int = -1,
    ) -> None:
        """Map the segment; the file descriptor may be closed afterwards. Loads the CPU kernels.

        Args:
            fd: from `create_segment`, of this or another process.
            rank: the rank of this process.
            world: ranks of the group.
            spin_us: microseconds for which a waiting rank spins before it sleeps; 0 if ranks share
                a processor.
            timeout_s: a wait that takes longer ends the group.
            notify: an eventfd that is signalled when this rank has written a piece of its values,
                which the bridge process sends to other machines; closed with this object. -1 = all
                ranks are on this machine.

        Raises:
            ValueError: the descriptor is not that of a group of `world` ranks, or there is no such
                rank.
            OSError: the system does not map the segment.
            NativeBuildError: the kernels cannot be built on this machine.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not in a group of {world}")
        size = check_segment(fd, world)
        self.rank, self.world = rank, world
        self._library = load("core").functions
        self._library.ostinato_group_open.restype = ctypes.c_void_p
        self.handle: int = (
            self._library.ostinato_group_open(
                fd,
                ctypes.c_int64(size),
                rank,
                ctypes.c_int64(spin_us),
                ctypes.c_int64(int(min(timeout_s, _LONGEST_WAIT_S) * 1000)),
                notify,
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
