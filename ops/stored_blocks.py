"""The op that unpacks the integers of the blocks of GGUF files (ops/native/quantized/blocks.cpp).

Until the kernel is loaded the op runs as plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.register import register_op

__all__ = ("BLOCK_LAYOUTS", "BlockLayout", "block_values")


class BlockLayout(NamedTuple):
    """Where the integers of a block lie."""

    values: int  # in a block
    low: int  # the byte where their low halves begin
    chunk: int  # bytes with low halves, whose high halves are the next values; 0 = whole bytes
    high: int = 0  # the byte where further bits begin
    high_bits: int = 0  # of a value
    least: int = 0  # what is subtracted from an integer


BLOCK_LAYOUTS = {
    "Q4_0": BlockLayout(32, 2, 16, least=8),
    "Q4_1": BlockLayout(32, 4, 16),
    "Q5_0": BlockLayout(32, 6, 16, 2, 1, least=16),
    "Q5_1": BlockLayout(32, 8, 16, 4, 1),
    "Q8_0": BlockLayout(32, 2, 0, least=128),
    "Q4_K": BlockLayout(256, 16, 32),
    "Q5_K": BlockLayout(256, 48, 32, 16, 1),
    "Q6_K": BlockLayout(256, 0, 64, 128, 2, least=32),
}
"""Types whose integers the op unpacks."""


def block_values(blocks: Tensor, type_name: str, added: int = 0) -> Tensor:
    """The integers of blocks, each from 0 on.

    Args:
        blocks: [blocks, bytes] uint8, contiguous.
        type_name: a key of BLOCK_LAYOUTS.
        added: to each integer; sums stay below 256.

    Returns:
        [blocks, values of a block] uint8.
    """
    return _block_values(blocks.contiguous(), type_name, added)


def _reference(blocks: Tensor, type_name: str, added: int) -> Tensor:
    layout = BLOCK_LAYOUTS[type_name]
    if layout.chunk == 0:
        return blocks[:, layout.low :] + 128 + added
    low = blocks[:, layout.low : layout.low + layout.values // 2]
    chunks = low.reshape(len(blocks), -1, layout.chunk)
    values = torch.cat((chunks & 15, chunks >> 4), -1).view(len(blocks), -1)
    if layout.high_bits:
        count = layout.values * layout.high_bits // 8
        bits = blocks[:, layout.high : layout.high + count]
        values |= _planes(bits, layout) << 4
    return values + added


def _planes(packed: Tensor, layout: BlockLayout) -> Tensor:
    """The further bits of each value."""
    shifts = range(0, 8, layout.high_bits)
    pieces = packed.reshape(len(packed), -1, min(32, packed.shape[1]))
    planes = torch.stack([pieces >> s & ((1 << layout.high_bits) - 1) for s in shifts], 2)
    if layout.values == 32:  # a byte has the bits of successive values
        planes = planes.transpose(2, 3)
    return planes.reshape(len(packed), -1)


def _fake(blocks: Tensor, type_name: str, added: int) -> Tensor:
    return blocks.new_empty(blocks.shape[0], BLOCK_LAYOUTS[type_name].values)


_block_values = register_op("block_values", {"CompositeExplicitAutograd": _reference}, fake=_fake)
