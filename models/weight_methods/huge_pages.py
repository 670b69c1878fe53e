"""Allocates CPU memory in huge pages, for weights and KV caches.

A decode step reads every weight once. The processor translates an address for each page, and its
prefetchers stop at the end of a page. So weights in pages of 4 KiB are read more slowly than those
in pages of 2 MiB: two threads of a Zen 3 summed 256 MiB at 21.7 and at 29.2 GB/s. Linux gives a
huge page only to memory that covers one. Most matrices of a small model are smaller, so they share
memory here.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

__all__ = ("HUGE_PAGE", "WeightMemory", "zeroed")

HUGE_PAGE = 2 << 20  # bytes

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64  # bytes; a cache line


class WeightMemory:
    """Shared memory for the matrices of one model, in chunks.

    A chunk is freed with the last matrix in it. The newest chunk is kept as long as the model.

    Pages are mapped when they are first written. So the end of a chunk that no matrix uses costs
    nothing.
    """

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0  # bytes of the chunk

    def __deepcopy__(self, memo: object) -> WeightMemory:
        """A copied layer takes its memory from the same chunk."""
        return self

    def moved(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor in shared huge pages; the tensor itself if it is large."""
        if tensor.nbytes == 0 or tensor.nbytes > _CHUNK_BYTES // 2:
            return tensor
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory without values in shared huge pages, or in pages of its own if it is large.

        A page is mapped when it is first written.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if num_bytes > _CHUNK_BYTES // 2:
            return zeroed(shape, dtype)
        if self._chunk is None or self._used + num_bytes > _CHUNK_BYTES:
            self._chunk, self._used = _mapped(_CHUNK_BYTES)
        place = torch.frombuffer(self._chunk, dtype=torch.uint8, count=num_bytes, offset=self._used)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return place.view(dtype).view(shape)


def zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in memory of their own, which begins at a huge page if it covers one.

    The system gives zeroed pages and maps a page when it is first written. So a cache of gigabytes
    costs no time at start, and no memory before it is used. Memory of torch's allocator could begin
    within a cache line. Then every vector would cross the border between two lines.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory, begin = _mapped(num_bytes)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=begin)
    return flat.view(dtype).view(shape)


def _mapped(num_bytes: int) -> tuple[mmap.mmap, int]:
    """New zeroed memory, and the offset at which `num_bytes` of it begin."""
    spare = HUGE_PAGE if num_bytes >= HUGE_PAGE else 0
    memory = mmap.mmap(-1, num_bytes + spare, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not spare:
        return memory, 0
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # If the system refuses (a kernel without huge pages), only speed is lost.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    return memory, -address % HUGE_PAGE
