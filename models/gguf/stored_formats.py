"""Converts the blocks of GGUF files to the formats that the kernels of ops/quantized.py multiply.

A format holds every value of its types exactly, so no value is rounded a second time. One matrix
may stack tensors of different types (Q4_K and Q6_K are usual in files named Q4_K_M). They share a
format that holds both.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ostinato.models.gguf.block_types import GROUPED_TYPES
from ostinato.ops.checkpoint_values.stored_blocks import (
    BLOCK_LAYOUTS,
    block_factors,
    block_values,
    pack_blocks,
)
from ostinato.ops.quantized_reference import QuantFormat

__all__ = ("FORMATS", "common_format", "in_format", "pack_rows")

FORMATS = {
    "Q4_0": QuantFormat(4, 32, True, "float16"),
    "Q4_1": QuantFormat(4, 32, False, "float16", "minimums"),
    "Q5_0": QuantFormat(8, 32, True, "float16"),
    "Q5_1": QuantFormat(8, 32, False, "float16", "minimums"),
    "Q8_0": QuantFormat(8, 32, True, "float16"),
    "Q2_K": QuantFormat(4, 16, False, "float32", "minimums"),
    "Q3_K": QuantFormat(4, 16, True, "float32"),
    "Q4_K": QuantFormat(4, 32, False, "float32", "minimums"),
    "Q5_K": QuantFormat(8, 32, False, "float32", "minimums"),
    "Q6_K": QuantFormat(8, 16, True, "float32"),
    "IQ4_NL": QuantFormat(8, 32, True, "float16"),
    "IQ4_XS": QuantFormat(8, 32, True, "float32"),
    "MXFP4": QuantFormat(8, 32, True, "float32"),
}
"""Type -> the smallest format of the kinds `steps` and `minimums` that holds it. A scale in a
super-block is the product of a float16 and an integer of 4 to 8 bits. So it needs float32.
"""

# Type -> what is added to its integers so that the least one becomes 0. A format with minimums adds
# this number, and not the 128 of 8-bit formats without minimums: with 128, `integer * scale` of
# Q6_K would not be exact in float32.
_LEAST = {name: layout.least for name, layout in BLOCK_LAYOUTS.items()} | {"Q3_K": 4}
_LEAST |= {"IQ4_NL": 127, "IQ4_XS": 127}


def common_format(types: Collection[str]) -> QuantFormat:
    """The smallest format that holds tensors of all of these types."""
    forms = [FORMATS[name] for name in types]
    kinds = {form.kind for form in forms}
    has_minimums = "minimums" in kinds
    is_float16 = len(kinds) == 1 and all(form.scales == "float16" for form in forms)
    return QuantFormat(
        bits=max(form.bits for form in forms),
        group_size=min(form.group_size for form in forms),
        symmetric=not has_minimums,
        scales="float16" if is_float16 else "float32",
        kind="minimums" if has_minimums else "steps",
    )


def in_format(type_name: str, blocks: Tensor, form: QuantFormat) -> dict[str, Tensor]:
    """Convert blocks of a type to a format.

    Args:
        type_name: a key of `FORMATS`.
        blocks: [blocks, bytes] uint8.
        form: `common_format` of types that include this one.

    Returns:
        `values` [blocks, values of a block] uint8, `scales` [blocks, groups of a block] float32,
        and, if the format has them, `minimums` like the scales.
    """
    added, offset = _offsets(type_name, form)
    if type_name in BLOCK_LAYOUTS:
        values = block_values(blocks, type_name, added)
        scales, shifts = block_factors(type_name, blocks)
    else:
        values, scales, shifts = GROUPED_TYPES[type_name](blocks)
        if offset:
            values = (values.short() + offset).to(torch.uint8)
    repeats = values.shape[1] // scales.shape[1] // form.group_size
    factors = _in_groups(scales, shifts, form, offset)
    found = {"values": values} | factors
    return {
        key: value if key == "values" or repeats == 1 else value.repeat_interleave(repeats, 1)
        for key, value in found.items()
    }


def pack_rows(
    packed: Tensor, type_name: str, blocks: Tensor, first_row: int, out_features: int
) -> None:
    """Write rows of a weight whose matrix consists of blocks, in the type's own format.

    Args:
        packed: `packed_shape` of the format, uint8; filled here.
        type_name: a key of `BLOCK_LAYOUTS`.
        blocks: [rows, blocks of a row, bytes] uint8, contiguous.
        first_row: the first row that is written. The order in which rows are written is free.
        out_features: rows of the matrix.
    """
    form = FORMATS[type_name]
    added, _ = _offsets(type_name, form)
    pack_blocks(
        packed, blocks, type_name, added, form, first_row=first_row, out_features=out_features
    )


def _offsets(type_name: str, form: QuantFormat) -> tuple[int, int]:
    """What is added to the integers of `block_values`, and the integer that then means zero."""
    least = _LEAST.get(type_name, 0)
    offset = least if form.kind == "minimums" else form.offset
    return offset - least, offset


def _in_groups(
    scales: Tensor, shifts: Tensor | None, form: QuantFormat, offset: int
) -> dict[str, Tensor]:
    """`scales` and, if the format has them, `minimums`, for groups of the format."""
    if form.kind != "minimums":
        return {"scales": scales}
    return {"scales": scales, "minimums": scales * offset if shifts is None else -shifts}
