"""The shapes of a model's KV cache and of its caches for cross attention, and their allocation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.models.weight_methods.huge_pages import zeroed

__all__ = ("CrossSpace", "KVCache", "KVCacheSpec")

_SCALE_BYTES = 4

KVCache = list[tuple[Tensor, Tensor]]
"""For each layer (k_cache, v_cache), each [num_blocks, num_kv_heads, block_size, E] and contiguous.

E is the size of a key or of a value. In int8 it is larger by 4 elements, for the float32 scale of
each key and value. The backend chooses where in a block the scales are.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The shape of a model's KV cache; `block_size` is the engine's choice."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # of keys
    value_dim: int = 0  # of values; 0 = head_dim
    block_size: int
    dtype: torch.dtype

    @property
    def place_sizes(self) -> tuple[int, int]:
        """Elements that the key and the value of one token and head take, scale included."""
        scale = _SCALE_BYTES if self.dtype is torch.int8 else 0
        return self.head_dim + scale, (self.value_dim or self.head_dim) + scale

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        elements = self.num_layers * self.num_kv_heads * self.block_size * sum(self.place_sizes)
        return elements * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        """The cache itself, zeroed. Block 0 is the null block, which no sequence owns."""
        key, value = (
            (num_blocks, self.num_kv_heads, self.block_size, size) for size in self.place_sizes
        )
        return [
            (_zeros(key, self.dtype, device), _zeros(value, self.dtype, device))
            for _ in range(self.num_layers)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossSpace:
    """The room for keys and values of encoder states: windows of equal size, in blocks."""

    num_windows: int  # without window 0, which stands for no window
    num_keys: int  # states of a window
    block_size: int  # keys of a block
    dtype: torch.dtype  # of the caches

    @property
    def blocks_per_window(self) -> int:
        """E, blocks of a window."""
        return -(-self.num_keys // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of a layer's caches."""
        return (1 + self.num_windows) * self.blocks_per_window


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if 0 in shape:  # an encoder has no cache
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type != "cpu":
        # Allocated as bytes, because some operations do not support the 8-bit dtypes.
        return (
            torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
            .view(dtype)
            .view(shape)
        )
    return zeroed(shape, dtype)
