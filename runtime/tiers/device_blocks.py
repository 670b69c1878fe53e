"""Copies whole KV blocks between the cache tensors of a device and buffers in host memory.

A buffer holds the bytes of one block: its part of each of `KVCache.pages`, in their order.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.models.kv_cache import KVCache

__all__ = ("CpuBlocks", "CudaBlocks", "DeviceBlocks", "Mark", "device_blocks")

_PIECE_BYTES = 256 << 20  # of pinned memory

Mark = torch.cuda.Event | None
"""A point in the work of a device; None on a CPU, whose copies have ended when a call returns."""


class DeviceBlocks(Protocol):
    """The blocks of a KV cache."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all tensors of the cache."""
        ...

    def make_buffers(self, count: int) -> list[Tensor]:
        """Host memory for `count` blocks, each [block_bytes] uint8."""
        ...

    def save(self, block_id: int, buffer: Tensor) -> None:
        """Begin to copy a block into a buffer, after the work that the caller began before.

        Args:
            block_id: the block.
            buffer: [block_bytes] uint8, one of `make_buffers`.
        """
        ...

    def mark(self) -> Mark:
        """The point after all work that the calling thread has begun."""
        ...

    def wait(self, mark: Mark) -> None:
        """Wait until the device has reached a mark."""
        ...

    def restore(self, block_id: int, buffer: Tensor, after: Mark) -> None:
        """Copy a buffer into a block; returns when the copy has ended. Steps go on meanwhile.

        Args:
            block_id: the block. No step reads or writes it meanwhile.
            buffer: [block_bytes] uint8, one of `make_buffers`.
            after: the copy begins when the device has reached this mark.
        """
        ...


def device_blocks(kv_cache: KVCache) -> DeviceBlocks:
    """The blocks of a cache on a CPU or a CUDA device."""
    is_cpu = kv_cache[0][0].device.type == "cpu"
    return CpuBlocks(kv_cache) if is_cpu else CudaBlocks(kv_cache)


def _rows(kv_cache: KVCache) -> list[Tensor]:
    """The tensors of a cache as bytes, each [num_blocks, bytes of a block in this tensor]."""
    return [page.view(torch.uint8).view(page.shape[0], -1) for page in kv_cache.pages]


class CpuBlocks:
    """The blocks of a cache in CPU memory."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._rows = [row.numpy() for row in _rows(kv_cache)]
        ends = np.cumsum([row.shape[1] for row in self._rows]).tolist()
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self._block_bytes = ends[-1]

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def make_buffers(self, count: int) -> list[Tensor]:
        return list(torch.empty(count, self._block_bytes, dtype=torch.uint8))

    def save(self, block_id: int, buffer: Tensor) -> None:
        to = buffer.numpy()
        for row, (begin, end) in zip(self._rows, self._spans, strict=True):
            to[begin:end] = row[block_id]

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        del mark  # copies on a CPU have ended

    def restore(self, block_id: int, buffer: Tensor, after: Mark) -> None:
        del after  # copies on a CPU have ended
        source = buffer.numpy()
        for row, (begin, end) in zip(self._rows, self._spans, strict=True):
            row[block_id] = source[begin:end]


class CudaBlocks:
    """The blocks of a cache in a GPU's memory.

    A block is gathered into one piece on the GPU, so that each block is one copy between GPU and
    host. `save` works on the current stream. `restore` works on a stream of its own.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._rows = _rows(kv_cache)
        self._sizes = [row.shape[1] for row in self._rows]
        self._device = self._rows[0].device
        pieces = torch.empty(2, sum(self._sizes), dtype=torch.uint8, device=self._device)
        self._saved, self._restored = pieces
        self._stream = torch.cuda.Stream(self._device)

    @property
    def block_bytes(self) -> int:
        return len(self._saved)

    def make_buffers(self, count: int) -> list[Tensor]:
        # torch rounds pinned memory up to a power of two, so each piece is one or nearly one.
        per_piece = max(1, _PIECE_BYTES // self.block_bytes)
        buffers: list[Tensor] = []
        for begin in range(0, count, per_piece):
            size = min(per_piece, count - begin), self.block_bytes
            buffers += torch.empty(*size, dtype=torch.uint8, pin_memory=True)
        return buffers

    def save(self, block_id: int, buffer: Tensor) -> None:
        torch.cat([row[block_id] for row in self._rows], out=self._saved)
        buffer.copy_(self._saved, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    def restore(self, block_id: int, buffer: Tensor, after: Mark) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._restored.copy_(buffer, non_blocking=True)
            parts = self._restored.split(self._sizes)
            rows = [row[block_id] for row in self._rows]
            # One or two kernels for all layers. No public function does this.
            torch._foreach_copy_(rows, list(parts))  # pyright: ignore[reportPrivateImportUsage]
            self.wait(self.mark())
