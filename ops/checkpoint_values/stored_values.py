"""The integers and floats of a quantised checkpoint: unpacks them, and packs them as weights.

Checkpoints store the values of a matrix [out, in] in 32-bit words or in bytes, in the orders of
`Packing`. `pack_stored` writes them to the weight that ops/quantized.py multiplies, in one pass, so
that a matrix is never in memory with a byte for each value. `unpack_values` gives these bytes.

The kernels are pack_stored.cpp and unpack.cpp in ops/native/quantized/. Until they are loaded the
same ops run as plain torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ostinato.ops.linear.packed_linear import PANEL
from ostinato.ops.native.library import load
from ostinato.ops.quantized_reference import QuantFormat, pack_quantized_reference
from ostinato.ops.register import register_op

__all__ = (
    "AWQ_ORDER",
    "Packing",
    "StoredValues",
    "pack_stored",
    "unpack_halves",
    "unpack_values",
    "unpack_words",
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each position in a word of AWQ, from the lowest bits up: the output to which its integer
belongs."""


class Packing(StrEnum):
    """Where stored values belong in the matrix [out, in]. The first value has the lowest bits."""

    bytes = "bytes"  # a byte is a value; [out, in]
    rows = "rows"  # successive inputs of an output; words or bytes [out, ...]
    columns = "columns"  # successive inputs of an output; words [..., out]
    awq = "awq"  # 8 outputs of an input in AWQ's order; words [in, ...]


class StoredValues(NamedTuple):
    """The values of some rows of a matrix, as a checkpoint stores them."""

    values: Tensor  # int32 words, or bytes of any dtype
    packing: Packing
    # of bytes that are integers: 2**(bits - 1) is added to each, modulo 256
    is_signed: bool = False


def pack_stored(
    packed: Tensor,
    stored: StoredValues,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    form: QuantFormat,
    *,
    first_row: int,
    in_features: int,
    group_columns: int,
) -> None:
    """Write rows of a quantised weight, as `pack_quantized_weight` would.

    A panel has 32 rows of the matrix. In the last panel, the rows after the written rows become
    zero. So the parts of a matrix must be written in the order of their rows. After the last part
    the whole weight has been written.

    Builds and loads the native library on first use.

    Args:
        packed: `form.packed_shape` of the whole matrix, uint8; rows `first_row` on are written.
        stored: the values of these rows.
        scales: [rows, stored groups] float16, bfloat16 or float32, of any strides.
        zeros: [rows, stored groups] int32, the integers that stand for zero; None if symmetric.
        order: [in] int32, for each column of the weight the stored column, or None; not for AWQ.
        form: the format of the weight; its kind is not `minimums`.
        first_row: the first row that is written; a multiple of 8 for AWQ.
        in_features: columns of the matrix.
        group_columns: columns of a stored group. Groups of the format divide it.

    Raises:
        ValueError: a shape or dtype is not as above.
        NativeBuildError: the kernels cannot be built here.
    """
    load("quantized")
    if scales.dtype not in (torch.float16, torch.bfloat16):
        scales = scales.float()
    _pack_stored(
        packed,
        _in_rows(stored),
        scales,
        zeros,
        order,
        first_row,
        in_features,
        group_columns,
        stored.is_signed,
        stored.packing.value,
        *form,
    )


def unpack_values(stored: StoredValues, bits: int) -> Tensor:
    """The values as bytes.

    Args:
        stored: the values, in any packing.
        bits: the number of bits of a value.

    Returns:
        [out, in] uint8, from 0 to 2**bits - 1. If a row does not fill its last word, the word's
        other values follow.
    """
    values = stored.values
    if stored.packing is Packing.bytes:
        return _in_rows(stored) + (1 << (bits - 1)) if stored.is_signed else _in_rows(stored)
    if values.dtype == torch.int32:
        return unpack_words(values, bits, stored.packing)
    return unpack_halves(_in_rows(stored)) if bits == 4 else _in_rows(stored)


def unpack_words(words: Tensor, bits: int, packing: Packing) -> Tensor:
    """Unpack the unsigned integers of 32-bit words.

    Args:
        words: [rows, columns] int32.
        bits: bits of one integer, 4 or 8. AWQ has 4.
        packing: where the integers of a word belong; not `bytes`.

    Returns:
        [out, in] uint8, contiguous.
    """
    return _unpack_words(words.contiguous(), bits, packing.value)


def unpack_halves(values: Tensor) -> Tensor:
    """The halves of bytes [out, in / 2] uint8 as [out, in] uint8, the lower one first."""
    if values.shape[1] % 4:
        return torch.stack((values & 15, values >> 4), -1).flatten(1)
    values = values.contiguous()
    if values.storage_offset() % 4:
        values = values.clone()
    return unpack_words(values.view(torch.int32), 4, Packing.rows)


def _in_rows(stored: StoredValues) -> Tensor:
    """The stored tensor as the kernel takes it: bytes [out, ...], or words; rows are contiguous."""
    values = stored.values.flatten(1)
    if values.shape[1] > 1 and values.stride(1) != 1:
        values = values.contiguous()
    return values.view(torch.uint8) if stored.packing in (Packing.bytes, Packing.rows) else values


def _unpack_words_reference(words: Tensor, bits: int, packing: str) -> Tensor:
    rows, columns = words.shape
    parts = words.view(torch.uint8).view(rows, columns, 4)
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), -1).view(rows, columns, 8)
    if packing == Packing.rows:
        return parts.reshape(rows, -1)
    if packing == Packing.columns:
        return parts.permute(1, 0, 2).reshape(columns, -1)
    parts = parts[:, :, [AWQ_ORDER.index(place) for place in range(8)]]
    return parts.permute(1, 2, 0).reshape(-1, rows)


def _unpack_words_fake(words: Tensor, bits: int, packing: str) -> Tensor:
    rows, columns = words.shape
    per_word = 32 // bits
    sizes = {
        Packing.rows: (rows, columns * per_word),
        Packing.columns: (columns, rows * per_word),
        Packing.awq: (columns * per_word, rows),
    }
    return words.new_empty(sizes[Packing(packing)], dtype=torch.uint8)


def _pack_stored_reference(
    packed: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    first_row: int,
    in_features: int,
    group_columns: int,
    is_signed: bool,
    packing: str,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    kind: str,
) -> None:
    """`pack_stored` in plain torch: unpacks the values, and packs them as bytes."""
    form = QuantFormat(bits, group_size, symmetric, scale_dtype, kind)
    integers = unpack_values(StoredValues(values, Packing(packing), is_signed), bits)
    integers = integers[: len(scales), :in_features]
    if order is not None:
        integers = integers.index_select(1, order)
    group = torch.arange(0, -(-in_features // 8) * 8, group_size) // group_columns
    above = first_row % PANEL  # rows of the first panel that earlier parts have written
    rows_above = (0, 0, above, 0)
    spread = pad(scales.float()[:, group], rows_above)
    spread_zeros = None
    if zeros is not None:  # a zero point of `offset` is stored as 0
        spread_zeros = pad(zeros.float()[:, group], rows_above, value=form.offset)
    found = pack_quantized_reference(pad(integers, rows_above), spread, spread_zeros, *form)
    panels = packed[first_row // PANEL :][: len(found)]
    if above:
        found[0] |= panels[0]
    panels.copy_(found)


def _pack_stored_fake(
    packed: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    first_row: int,
    in_features: int,
    group_columns: int,
    is_signed: bool,
    packing: str,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    kind: str,
) -> None:
    return None


_unpack_words = register_op(
    "unpack_words",
    {"CompositeExplicitAutograd": _unpack_words_reference},
    fake=_unpack_words_fake,
)
_pack_stored = register_op(
    "pack_stored",
    {"CompositeExplicitAutograd": _pack_stored_reference},
    fake=_pack_stored_fake,
    mutates=("packed",),
)
