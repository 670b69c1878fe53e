"""Maps the memory pages of a CPU's KV cache shortly before they are used.

The whole cache is allocated at the start, but the system maps and zeroes a page only when the page
is first written to. This would happen within a step, at about 2 GB/s, while the threads of a kernel
wait for each other. The block pool allocates unused blocks before it evicts cached ones, so every
prompt would pay for this until the whole cache has been used.

Therefore a thread maps the pages of the next blocks while the engine is idle. While the engine
starts, the thread maps only those of the first blocks, because the start needs the processor. The
thread does not run during a step, because it would slow the step down. Pages far beyond the blocks
in use are not mapped.
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
# Bytes that are mapped beyond the blocks in use. They hold the prompts of a few large steps.
_AHEAD_BYTES = 256 << 20
_AHEAD_AT_START = 32 << 20  # bytes that are mapped while the engine starts
_PIECE_BYTES = 2 << 20  # bytes that are mapped at a time: one huge page of one tensor
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def map_ahead(kv_cache: KVCache, spec: KVCacheSpec) -> CachePages | None:
    """Start to map pages. None if the cache is not on a CPU, or holds no keys and values."""
    if not spec.bytes_per_block or kv_cache[0][0].device.type != "cpu":
        return None
    return CachePages(kv_cache, spec.bytes_per_block)


class CachePages:
    """Keeps the pages of the next blocks mapped. Methods may be called from any thread.

    Args:
        kv_cache: a KV cache on the CPU.
        bytes_per_block: bytes of a block in all tensors of the cache.
    """

    def __init__(self, kv_cache: KVCache, bytes_per_block: int) -> None:
        self._tensors = kv_cache.pages
        self._num_blocks = self._tensors[0].shape[0]
        self._ahead = max(1, _AHEAD_BYTES // bytes_per_block)
        # Blocks [0, _wanted) are to be mapped.
        self._wanted = min(max(1, _AHEAD_AT_START // bytes_per_block), self._num_blocks)
        self._mapped = 0
        self._busy = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cache-pages", daemon=True)
        self._thread.start()

    def use(self, block_id: int) -> None:
        """Note that blocks up to this one are in use. Returns at once."""
        wanted = min(block_id + 1 + self._ahead, self._num_blocks)
        # Wake the thread only after a quarter of `_ahead`, so that a decoding engine does not wake
        # it at every block.
        if wanted - self._wanted <= self._ahead // 4 and wanted < self._num_blocks:
            return
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify_all()

    def set_busy(self, busy: bool) -> None:
        """Note whether steps run. Nothing is mapped while steps run.

        The engine is idle for the first time after its start. Then all pages of the next blocks
        are requested.
        """
        if not busy:
            self.use(0)
        if busy != self._busy:
            with self._changed:
                self._busy = busy
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all requested pages are mapped, or mapping failed; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._mapped >= self._wanted, timeout_s)

    def close(self) -> None:
        """End the thread. Must be called before the cache is freed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform != "linux":
            self._give_up(f"madvise of {sys.platform} has no MADV_POPULATE_WRITE")
            return
        # The thread keeps the usual priority. A thread that the system seldom runs would hold the
        # interpreter's lock for long.
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
    """Map the pages of bytes `begin` to `end` for writing; returns the error, or None.

    The contents of the pages are kept.
    """
    page = mmap.PAGESIZE
    first = (tensor.data_ptr() + begin) // page * page
    last = -(-(tensor.data_ptr() + end) // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(last - first)
    if libc.madvise(ctypes.c_void_p(first), length, _MADV_POPULATE_WRITE) == 0:
        return None
    return os.strerror(ctypes.get_errno())
