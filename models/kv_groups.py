"""KV groups: layers with a sliding window have blocks of their own, which are freed behind it.

A layer with a window of W tokens reads no key or value that is W or more tokens old. A layer
without one reads all of them. So a model with both kinds keeps two block tables for each sequence,
one for each kind of layer, and frees the blocks of the second kind as its sequence moves on. The
idea is that of vLLM's hybrid KV cache manager (its issue 11382); the layout here is another one.

Both tables take their blocks from one pool, so a block must have the same size in bytes whatever it
holds. The kind with more layers has blocks of `block_size` tokens. The kind with fewer layers has
blocks of a multiple of that. A model with 5 layers without and 29 layers with a window has

    5 layers * 96 tokens = 480 and 29 layers * 16 tokens = 464, in a block with room for 480.

In memory, the keys (and the values) of all blocks are `num_slots` tensors. A slot belongs to one
layer of the smaller kind, and to `KVGroup.pieces` layers of the larger kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = (
    "REPEATED_TOKENS",
    "WHOLE_CACHE",
    "KVGroup",
    "LayerPlace",
    "kv_groups",
    "layer_places",
    "longest_sequence",
    "num_slots",
    "sequence_blocks",
)

_MOST_UNITS = 8  # tokens of the largest block, in `block_size`
REPEATED_TOKENS = 8
"""Positions before a sequence's next one that a later step may compute again, at most.

A step that gave no token is repeated, and another step can have been planned meanwhile.
"""


class KVGroup(NamedTuple):
    """The layers that share a block table."""

    window: int = 0  # tokens that the layers see at most, the newest included; 0 = all
    units: int = 1  # a block holds `units * block_size` tokens
    # Blocks of one layer that a block of the pool has room for. The layers of the group take them
    # in turn: block b of the pool is block `b * pieces + piece` of a layer (`layer_places`).
    pieces: int = 1


WHOLE_CACHE = (KVGroup(),)
"""The groups of a model whose layers all keep everything: one."""


class LayerPlace(NamedTuple):
    """Where a layer's keys and values lie."""

    group: int  # index of the layer's `KVGroup`
    slot: int  # index of the pair of tensors
    piece: int  # the layer's first block in these tensors


def kv_groups(windows: Sequence[int], max_model_len: int) -> tuple[KVGroup, ...]:
    """The groups of a model's layers. If there are two, the second has the layers with a window.

    The multiple of `block_size` is the one with which a sequence of the greatest length takes the
    least memory.

    Args:
        windows: for each layer of the whole model, the tokens that it sees, as `paged_attention`
            takes them: 0 = all, -C = those of its chunk of C tokens.
        max_model_len: tokens of the longest sequence.
    """
    window = max(map(abs, windows), default=0)
    if window >= max_model_len or not window:
        return WHOLE_CACHE  # no block would be freed
    num_windowed = sum(one != 0 for one in windows)
    num_full = len(windows) - num_windowed
    if not num_full:
        return (KVGroup(window),)
    best, least = WHOLE_CACHE, float(len(windows) * max_model_len)
    for ratio in range(1, _MOST_UNITS + 1):
        small, large = (1, ratio), (ratio, 1)  # units and pieces
        if num_full > num_windowed:
            groups = KVGroup(0, *small), KVGroup(window, *large)
        else:
            groups = KVGroup(0, *large), KVGroup(window, *small)
        # Tokens of one layer that a sequence of the greatest length has room for while it decodes.
        kept = max_model_len / groups[0].units + window / groups[1].units
        room = kept * ratio * num_slots(windows, groups)
        if room < least:
            best, least = groups, room
    return best


def layer_places(windows: Sequence[int], groups: tuple[KVGroup, ...]) -> list[LayerPlace]:
    """The place of each layer.

    Args:
        windows: as for `kv_groups`, of the layers of one pipeline stage.
        groups: those of the whole model.
    """
    counts = [0] * len(groups)
    places: list[LayerPlace] = []
    for window in windows:
        group = int(len(groups) > 1 and window != 0)
        slot, piece = divmod(counts[group], groups[group].pieces)
        counts[group] += 1
        places.append(LayerPlace(group, slot, piece))
    return places


def num_slots(windows: Sequence[int], groups: tuple[KVGroup, ...]) -> int:
    """Pairs of tensors that the layers of one pipeline stage need; see `layer_places`."""
    return max((place.slot + 1 for place in layer_places(windows, groups)), default=0)


def sequence_blocks(
    groups: tuple[KVGroup, ...], block_size: int, num_tokens: int, step_tokens: int
) -> int:
    """The most blocks of the pool that a sequence holds at once.

    Args:
        groups: the model's.
        block_size: tokens of a unit.
        num_tokens: tokens of the sequence.
        step_tokens: tokens of the largest step. The blocks of a prompt's chunk are taken before the
            step that computes it, and those that lie outside of the window are freed after it.
    """
    total = 0
    for window, units, _ in groups:
        size = units * block_size
        count = -(-num_tokens // size)
        if window:
            count = min(count, -(-(window + step_tokens + REPEATED_TOKENS) // size) + 1)
        total += count
    return total


def longest_sequence(
    groups: tuple[KVGroup, ...], block_size: int, num_blocks: int, step_tokens: int
) -> int:
    """Tokens of the longest sequence that holds at most `num_blocks` blocks at once.

    If all layers have a window, no length needs more blocks than another one. Then the result is at
    most the number of tokens of all blocks.
    """
    low, high = 0, max(0, num_blocks) * block_size * max(group.units for group in groups)
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_blocks(groups, block_size, middle, step_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
