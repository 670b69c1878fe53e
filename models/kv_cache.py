"""The shapes and the allocation of what a model keeps of earlier tokens.

These are the KV cache, the states of recurrent layers, and the caches of cross attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup, layer_places, num_slots
from ostinato.models.weight_methods.huge_pages import zeroed

__all__ = ("CrossSpace", "KVCache", "KVCacheSpec", "RecurrentCache")

_SCALE_BYTES = 4


class KVCache(list[tuple[Tensor, Tensor]]):
    """For each layer (k_cache, v_cache), each [blocks, num_kv_heads, tokens, E] and contiguous.

    A recurrent layer has (conv_state, state) in their place; see `RecurrentCache`. A layer that
    keeps nothing has two tensors without elements.

    E is the size of a key or of a value. In int8 it is larger by 4 elements, for the float32 scale
    of each key and value. The backend chooses where in a block the scales are.

    If all layers have one block table, the tensors of a layer are its own, and their blocks are the
    blocks of the pool. Otherwise layers share tensors: those of a layer are views that begin at its
    first block (models/kv_groups.py).

    Args:
        layers: for each layer (k_cache, v_cache).
        pages: the distinct tensors, each [num_blocks, ...] and contiguous, with the blocks of the
            pool; None = those of the layers, which share none.
    """

    def __init__(
        self, layers: Iterable[tuple[Tensor, Tensor]], pages: list[Tensor] | None = None
    ) -> None:
        super().__init__(layers)
        self.pages = [side for layer in self for side in layer] if pages is None else pages


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentCache:
    """What the recurrent layers of a stage keep: for each layer, a row for every slot.

    A sequence has a slot in place of blocks. Slot 0 stands for a sequence that begins; it is never
    read, and only warm-up steps write it.
    """

    layers: tuple[bool, ...]  # of the stage: whether a layer is recurrent
    conv: tuple[int, int]  # (width - 1, channels), in `conv_dtype`
    state: tuple[int, ...]  # float32; empty = only the inputs of the convolution are kept
    conv_dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers."""
        state = math.prod(self.state) * 4 if self.state else 0
        return sum(self.layers) * (math.prod(self.conv) * self.conv_dtype.itemsize + state)

    def allocate(self, num_slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tensors of one layer, zeroed: [num_slots, *conv] and [num_slots, *state] float32.

        Without a state the second has no elements.
        """
        conv = _zeros((num_slots, *self.conv), self.conv_dtype, device)
        state = (num_slots, *self.state) if self.state else (0,)
        return conv, _zeros(state, torch.float32, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The shape of a model's KV cache; `block_size` is the engine's choice."""

    num_layers: int  # with attention
    num_kv_heads: int
    head_dim: int  # of keys
    value_dim: int = 0  # of values; 0 = head_dim
    block_size: int
    dtype: torch.dtype
    windows: tuple[int, ...] = ()  # of each layer, as `kv_groups` takes them; empty = all 0
    groups: tuple[KVGroup, ...] = WHOLE_CACHE  # those of the whole model
    recurrent: RecurrentCache | None = None  # what other layers keep
    # Of the stage, per layer: whether it keeps nothing. Empty = every layer keeps something.
    stateless: tuple[bool, ...] = ()

    @property
    def place_sizes(self) -> tuple[int, int]:
        """Elements that the key and the value of one token and head take, scale included."""
        scale = _SCALE_BYTES if self.dtype is torch.int8 else 0
        return self.head_dim + scale, (self.value_dim or self.head_dim) + scale

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, keys and values."""
        elements = self.num_layers * self.num_kv_heads * sum(self.place_sizes)
        return elements * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool: keys and values of all slots."""
        slots = num_slots(self._windows, self.groups)
        elements = slots * self.num_kv_heads * self._page_tokens * sum(self.place_sizes)
        return elements * self.dtype.itemsize

    @property
    def _windows(self) -> tuple[int, ...]:
        return self.windows or (0,) * self.num_layers

    @property
    def _page_tokens(self) -> int:
        """Tokens of a layer that a slot's part of a block has room for; equal for all groups."""
        return self.block_size * self.groups[0].units * self.groups[0].pieces

    def allocate(self, num_blocks: int, device: torch.device, num_states: int = 0) -> KVCache:
        """The cache itself, zeroed. Block 0 is the null block, which no sequence owns.

        Args:
            num_blocks: blocks of the pool.
            device: where it is.
            num_states: slots of recurrent layers, slot 0 included.
        """
        pages = [
            tuple(
                _zeros((num_blocks, self.num_kv_heads, self._page_tokens, size), self.dtype, device)
                for size in self.place_sizes
            )
            for _ in range(num_slots(self._windows, self.groups))
        ]
        layers: list[tuple[Tensor, Tensor]] = []
        for place in layer_places(self._windows, self.groups):
            group = self.groups[place.group]
            k_cache, v_cache = (
                page.view(-1, self.num_kv_heads, group.units * self.block_size, page.shape[3])
                if page.numel()
                else page
                for page in pages[place.slot]
            )
            layers.append((k_cache[place.piece :], v_cache[place.piece :]))
        layers = self._with_other_layers(layers, device, num_states)
        return KVCache(layers, [side for page in pages for side in page])

    def _with_other_layers(
        self, attention: list[tuple[Tensor, Tensor]], device: torch.device, num_states: int
    ) -> list[tuple[Tensor, Tensor]]:
        """The caches of all layers, those of layers without attention included."""
        recurrent = () if self.recurrent is None else self.recurrent.layers
        none = (False,) * max(len(recurrent), len(self.stateless), len(attention))
        nothing = torch.empty(0, dtype=self.dtype, device=device)
        with_attention = iter(attention)
        layers: list[tuple[Tensor, Tensor]] = []
        for is_recurrent, is_stateless in zip(
            recurrent or none, self.stateless or none, strict=True
        ):
            if is_stateless:
                layers.append((nothing, nothing))
            elif is_recurrent and self.recurrent is not None:
                layers.append(self.recurrent.allocate(num_states, device))
            else:
                layers.append(next(with_attention))
        return layers


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
