"""Maps the memory pages of a CPU's KV cache shortly before they are used.

The cache is allocated whole, but the system gives a page when it is first written to, zeroed:
within a step, at 2 GB/s, while the threads of a kernel wait for one another. The block pool hands
out blocks that were never used before it gives up cached ones, so a busy engine pays for it at
every prompt until the whole cache was used. A thread asks for the pages of the next blocks instead,
while the engine starts and when it has nothing to do: zeroing beside a step would hold it up just
so. Memory that no request comes near is never taken.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading

from torch import Tensor

from ostinato.models.kv_cache import KVCache, KVCacheSpec

__all__ = ("CachePages", "map_ahead")

_LOG = logging.getLogger(__name__)
_AHEAD_BYTES = 256 << 20  # of the whole cache: a few of the largest steps' prompts
_PIECE_BYTES = 2 << 20  # of one tensor at a time: a huge page
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def map_ahead(kv_cache: KVCache, spec: KVCacheSpec) -> CachePages | None:
    """Begin with it, where there is something to map: a cache of a decoder on a CPU."""
    if not spec.bytes_per_block or kv_cache[0][0].device.type != "cpu":
        return None
    return CachePages(kv_cache, spec.bytes_per_block)


class CachePages:
    """Keeps the pages of the next blocks mapped; for one engine, from any thread.

    Args:
        kv_cache: on the CPU.
        bytes_per_block: over all its tensors.
    """

    def __init__(self, kv_cache: KVCache, bytes_per_block: int) -> None:
        self._tensors = [side for layer in kv_cache for side in layer]
        self._num_blocks = self._tensors[0].shape[0]
        self._ahead = max(1, _AHEAD_BYTES // bytes_per_block)
        self._wanted = 0  # blocks [0, wanted) shall be mapped
        self._mapped = 0
        self._busy = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cache-pages", daemon=True)
        self._thread.start()
        self.use(0)

    def use(self, block_id: int) -> None:
        """Blocks up to this one are in use. Returns at once."""
        wanted = min(block_id + 1 + self._ahead, self._num_blocks)
        # a quarter late, so that a decoding engine does not wake the thread at every block
        if wanted - self._wanted <= self._ahead // 4 and wanted < self._num_blocks:
            return
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify_all()

    def set_busy(self, busy: bool) -> None:
        """Whether steps are being run; while they are nothing is mapped."""
        if busy != self._busy:
            with self._changed:
                self._busy = busy
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether all pages that are wanted by now are mapped, or given up, within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._mapped >= self._wanted, timeout_s)

    def close(self) -> None:
        """End the thread; before the cache is freed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform != "linux":
            self._give_up(f"madvise of {sys.platform} has no such request")
            return
        # At the priority of all: a thread that the system seldom runs would keep the others waiting
        # for the interpreter's lock.
        row_bytes = self._tensors[0][0].nbytes
        piece = max(1, _PIECE_BYTES // max(1, row_bytes))
        while True:
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(self._has_work)
                if self._closed:
                    return
                end = min(self._mapped + piece, self._wanted)
            for tensor in self._tensors:
                while self._busy and not self._closed:
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed or not self._busy)
                error = _map(tensor, self._mapped * row_bytes, end * row_bytes)
                if error:
                    self._give_up(error)
                    return
            self._mapped = end

    def _has_work(self) -> bool:
        return self._closed or (self._mapped < self._wanted and not self._busy)

    def _give_up(self, reason: str) -> None:
        _LOG.debug("pages of the KV cache are mapped when they are used: %s", reason)
        with self._changed:
            self._num_blocks = self._wanted = self._mapped
            self._changed.notify_all()


def _map(tensor: Tensor, begin: int, end: int) -> str | None:
    """Have these bytes' pages mapped for writing, contents kept; why that failed, or None."""
    page = mmap.PAGESIZE
    first = (tensor.data_ptr() + begin) // page * page
    last = -(-(tensor.data_ptr() + end) // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(last - first)
    if libc.madvise(ctypes.c_void_p(first), length, _MADV_POPULATE_WRITE) == 0:
        return None
    return os.strerror(ctypes.get_errno())
