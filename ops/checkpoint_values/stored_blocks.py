"""The blocks of GGUF files: unpacks their integers, and packs them as quantised weights.

A row of a matrix is a sequence of blocks of 32 or 256 values. `block_values` gives the integers of
blocks as bytes, and `block_factors` their scales. `pack_blocks` gives the weight that
ops/quantized.py multiplies, in one pass over the blocks, so that the integers and the scales of a
whole matrix are in memory in the weight only.

The kernels are blocks.cpp and pack_blocks.cpp in ops/native/quantized/. Until they are loaded the
same ops run as plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ostinato.ops.linear.packed_linear import PANEL
from ostinato.ops.native.library import load
from ostinato.ops.quantized_reference import E2M1, QuantFormat, pack_quantized_reference
from ostinato.ops.register import register_op

__all__ = (
    "BLOCK_LAYOUTS",
    "BlockLayout",
    "block_factors",
    "block_values",
    "half_at",
    "pack_blocks",
)

# scales [blocks, groups of a block] float32, and shifts or None
_Factors = tuple[Tensor, Tensor | None]


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


def block_factors(type_name: str, blocks: Tensor) -> _Factors:
    """The scales, and shifts or None, of blocks.

    Args:
        type_name: a key of BLOCK_LAYOUTS.
        blocks: [blocks, bytes] uint8.

    Returns:
        Scales [blocks, groups of a block] float32; shifts of the same shape, or None.
    """
    return _FACTORS[type_name](blocks)


def half_at(blocks: Tensor, begin: int) -> Tensor:
    """The float16 number at an even byte of each block: [blocks, 1] float32."""
    place = begin // 2
    return blocks.contiguous().view(torch.float16)[:, place : place + 1].float()


def pack_blocks(
    packed: Tensor,
    blocks: Tensor,
    type_name: str,
    added: int,
    form: QuantFormat,
    *,
    first_row: int,
    out_features: int,
) -> None:
    """Write rows of a quantised weight, as `pack_quantized_weight` would.

    Minimums are minus the shifts. Other rows stay as they are. The padding after the last row of
    the matrix becomes zero when that row is written. So the parts of a matrix can be written in any
    order.

    Builds and loads the native library on first use.

    Args:
        packed: `form.packed_shape` of the whole matrix, uint8; filled here.
        blocks: [rows, blocks of a row, bytes] uint8, contiguous.
        type_name, added: as for `block_values`.
        form: the type's own format: its groups, its dtype of scales, and minimums if it has shifts.
        first_row: the first row that is written.
        out_features: rows of the matrix.

    Raises:
        ValueError: a shape or dtype is not as above.
        NativeBuildError: the kernels cannot be built here.
    """
    load("quantized")
    _pack_blocks(packed, blocks, type_name, added, first_row, out_features, *form)


def _k_factors(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes (Q4_K, Q5_K): each [blocks, 8]."""
    # four bytes at a time; what a shift moves across a byte's border is masked out
    scale, least, rest = packed.contiguous().view(torch.int32).unbind(1)
    low, high = 0x0F0F0F0F, 0x30303030
    scales = torch.stack((scale & 0x3F3F3F3F, rest & low | scale >> 2 & high), 1)
    minima = torch.stack((least & 0x3F3F3F3F, rest >> 4 & low | least >> 2 & high), 1)
    return scales.view(torch.uint8).float(), minima.view(torch.uint8).float()


def _halves(scale: int, shift: int | None = None) -> Callable[[Tensor], _Factors]:
    """Reads one scale from each block, at byte `scale`, and a shift, if given, at byte `shift`."""
    return lambda blocks: (
        half_at(blocks, scale),
        None if shift is None else half_at(blocks, shift),
    )


def _k_products(blocks: Tensor) -> _Factors:
    scales, minima = _k_factors(blocks[:, 4:16])
    return half_at(blocks, 0) * scales, -(half_at(blocks, 2) * minima)


def _q6_k_scales(blocks: Tensor) -> _Factors:
    factors = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return half_at(blocks, 208) * factors, None


def _power_of_two(blocks: Tensor) -> _Factors:
    exponent = blocks[:, :1].int()
    # 2 ** (exponent - 128), as bits; the two smallest are subnormal numbers.
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.int().view(torch.float32), None


_FACTORS: dict[str, Callable[[Tensor], _Factors]] = {
    "Q4_0": _halves(0),
    "Q4_1": _halves(0, 2),
    "Q5_0": _halves(0),
    "Q5_1": _halves(0, 2),
    "Q8_0": _halves(0),
    "Q4_K": _k_products,
    "Q5_K": _k_products,
    "Q6_K": _q6_k_scales,
    "MXFP4": _power_of_two,
}


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
    packed: Tensor,
    blocks: Tensor,
    type_name: str,
    added: int,
    first_row: int,
    out_features: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    kind: str,
) -> None:
    rows, before = len(blocks), first_row % PANEL
    flat = blocks.flatten(0, 1)
    values = _block_values_reference(flat, type_name, added).view(rows, -1)
    scales, shifts = block_factors(type_name, flat)

    def in_panels(part: Tensor) -> Tensor:
        return pad(part.view(rows, -1), (0, 0, before, 0))

    minimums = None if shifts is None else in_panels(-shifts)
    panels = pack_quantized_reference(
        in_panels(values),
        in_panels(scales),
        minimums,
        bits,
        group_size,
        symmetric,
        scale_dtype,
        kind,
    )
    form = QuantFormat(bits, group_size, symmetric, scale_dtype, kind)
    first_panel = first_row // PANEL
    row = torch.arange(len(panels))[:, None] * PANEL + _columns_of_bytes(form, values.shape[1])
    is_written = (row >= before) & (row < before + rows)
    if first_row + rows == out_features:
        is_written |= row >= before + rows
    target = packed[first_panel : first_panel + len(panels)]
    target.copy_(torch.where(is_written, panels, target))


def _columns_of_bytes(form: QuantFormat, in_features: int) -> Tensor:
    """For each byte of a panel, its row of the matrix within the panel."""
    columns = torch.arange(PANEL)
    header = columns.repeat_interleave(form.factors.itemsize)
    found: list[Tensor] = []
    for begin in range(0, in_features, form.group_size):
        size = min(form.group_size, in_features - begin)
        units = -(-size // 8) * form.bits // 4
        found += [header] * (1 if form.symmetric else 2) + [columns.repeat_interleave(4)] * units
    return torch.cat(found)


def _pack_blocks_fake(
    packed: Tensor,
    blocks: Tensor,
    type_name: str,
    added: int,
    first_row: int,
    out_features: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    kind: str,
) -> None:
    pass


_block_values = register_op(
    "block_values",
    {"CompositeExplicitAutograd": _block_values_reference},
    fake=_block_values_fake,
)
_pack_blocks = register_op(
    "pack_blocks",
    {"CompositeExplicitAutograd": _pack_blocks_reference},
    fake=_pack_blocks_fake,
    mutates=("packed",),
)
