"""The blocks of GGUF files: unpacks their integers, and packs them as quantised weights.

A row of a matrix is a sequence of blocks of 32 or 256 values. `block_values` gives the integers of
blocks as bytes. `pack_blocks` gives the weight that ops/quantized.py multiplies, panel by panel, so
that the integers of a whole matrix are never in memory as bytes.

The kernels are blocks.cpp and repack.cpp in ops/native/quantized/. Until they are loaded the same
ops run as plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.native.library import load
from ostinato.ops.quantized_reference import E2M1, QuantFormat, pack_quantized_reference
from ostinato.ops.register import register_op

__all__ = ("BLOCK_LAYOUTS", "BlockLayout", "block_values", "pack_blocks")


class BlockLayout(NamedTuple):
    """Where the integers of a block of a GGUF file lie."""

    values: int  # the number of integers in a block
    low: int  # the byte where the low 4 bits of the integers begin
    # This many bytes hold this many integers in their low 4 bits, and the next integers in their
    # high 4 bits. 0 = an integer is a whole byte.
    chunk: int
    high: int = 0  # the byte where the bits above the low 4 begin
    high_bits: int = 0  # how many of these bits an integer has
    least: int = 0  # what GGUF subtracts from an integer
    is_e2m1: bool = False  # the 4 bits are a float; the integer is twice its value, plus 12


BLOCK_LAYOUTS = {
    "Q4_0": BlockLayout(32, 2, 16, least=8),
    "Q4_1": BlockLayout(32, 4, 16),
    "Q5_0": BlockLayout(32, 6, 16, 2, 1, least=16),
    "Q5_1": BlockLayout(32, 8, 16, 4, 1),
    "Q8_0": BlockLayout(32, 2, 0, least=128),
    "Q4_K": BlockLayout(256, 16, 32),
    "Q5_K": BlockLayout(256, 48, 32, 16, 1),
    "Q6_K": BlockLayout(256, 0, 64, 128, 2, least=32),
    "MXFP4": BlockLayout(32, 1, 16, least=12, is_e2m1=True),
}
"""GGUF's types whose integers the ops unpack."""


def block_values(blocks: Tensor, type_name: str, added: int = 0) -> Tensor:
    """The integers of blocks of a GGUF file, as unsigned numbers.

    Args:
        blocks: [blocks, bytes] uint8, contiguous.
        type_name: a key of BLOCK_LAYOUTS.
        added: what is added to each integer; sums stay below 256.

    Returns:
        [blocks, values of a block] uint8.
    """
    return _block_values(blocks.contiguous(), type_name, added)


def pack_blocks(
    blocks: Tensor,
    type_name: str,
    added: int,
    scales: Tensor,
    zeros: Tensor | None,
    form: QuantFormat,
) -> Tensor:
    """`pack_quantized_weight` of the integers of blocks. They are never all in memory at once.

    Builds and loads the native library on first use.

    Args:
        blocks: [blocks, bytes] uint8, contiguous; each row of the matrix has equally many.
        type_name, added: as for `block_values`.
        scales, zeros, form: as for `pack_quantized_weight`.

    Raises:
        ValueError: a shape or dtype is not as above.
        NativeBuildError: the kernels cannot be built here.
    """
    load("quantized")
    return _pack_blocks(blocks, type_name, added, scales, zeros, *form)


def _block_values_reference(blocks: Tensor, type_name: str, added: int) -> Tensor:
    layout = BLOCK_LAYOUTS[type_name]
    if layout.chunk == 0:
        return blocks[:, layout.low :] + 128 + added
    low = blocks[:, layout.low : layout.low + layout.values // 2]
    chunks = low.reshape(len(blocks), -1, layout.chunk)
    values = torch.cat((chunks & 15, chunks >> 4), -1).view(len(blocks), -1)
    if layout.is_e2m1:
        values = torch.tensor(E2M1, dtype=torch.uint8)[values.int()]
    if layout.high_bits:
        count = layout.values * layout.high_bits // 8
        bits = blocks[:, layout.high : layout.high + count]
        values |= _planes(bits, layout) << 4
    return values + added


def _planes(packed: Tensor, layout: BlockLayout) -> Tensor:
    """The bits above the low 4 of each integer."""
    shifts = range(0, 8, layout.high_bits)
    pieces = packed.reshape(len(packed), -1, min(32, packed.shape[1]))
    planes = torch.stack([pieces >> s & ((1 << layout.high_bits) - 1) for s in shifts], 2)
    if layout.values == 32:  # a byte has the bits of successive values
        planes = planes.transpose(2, 3)
    return planes.reshape(len(packed), -1)


def _block_values_fake(blocks: Tensor, type_name: str, added: int) -> Tensor:
    return blocks.new_empty(blocks.shape[0], BLOCK_LAYOUTS[type_name].values)


def _pack_blocks_reference(
    blocks: Tensor,
    type_name: str,
    added: int,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    kind: str,
) -> Tensor:
    values = _block_values_reference(blocks, type_name, added).view(len(scales), -1)
    return pack_quantized_reference(
        values, scales, zeros, bits, group_size, symmetric, scale_dtype, kind
    )


def _pack_blocks_fake(
    blocks: Tensor,
    type_name: str,
    added: int,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    kind: str,
) -> Tensor:
    row_blocks = blocks.shape[0] // scales.shape[0]
    size = (scales.shape[0], row_blocks * BLOCK_LAYOUTS[type_name].values)
    form = QuantFormat(bits, group_size, symmetric, scale_dtype, kind)
    return blocks.new_empty(form.packed_shape(*size))


_block_values = register_op(
    "block_values",
    {"CompositeExplicitAutograd": _block_values_reference},
    fake=_block_values_fake,
)
_pack_blocks = register_op(
    "pack_blocks",
    {"CompositeExplicitAutograd": _pack_blocks_reference},
    fake=_pack_blocks_fake,
)
