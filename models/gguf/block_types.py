"""The tensor types of GGUF files: decodes their blocks of bytes into integers and scales.

A row of a quantised tensor is a sequence of blocks of 32 or 256 values. Each type has a function
that decodes blocks into integers. Each group of integers has a scale, and for some types a shift:

    value = integer * scale + shift

The formula and the layouts are those of llama.cpp's ggml-quants.c. In float32, and with the product
before the sum, the values have the same bits as those of the `gguf` package's `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.checkpoint_values.stored_blocks import (
    BLOCK_LAYOUTS,
    block_factors,
    block_values,
    half_at,
)

__all__ = (
    "FLOAT_TYPES",
    "GROUPED_TYPES",
    "Grouped",
    "dequantize",
    "why_unsupported",
)

FLOAT_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types whose tensors hold floats -> their dtype."""

# The 16 values of IQ4_NL and IQ4_XS.
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Grouped(NamedTuple):
    """Decoded blocks: integers, and for each group of them a scale and, in some types, a shift."""

    values: Tensor  # [blocks, values of a block] int8 or uint8
    scales: Tensor  # [blocks, groups of a block] float32
    shifts: Tensor | None  # [blocks, groups of a block] float32; None = zeros

    def dense(self) -> Tensor:
        """[blocks, values of a block] float32."""
        blocks, groups = self.scales.shape
        values = self.values.view(blocks, groups, -1).float() * self.scales[:, :, None]
        if self.shifts is not None:
            values += self.shifts[:, :, None]
        return values.view(blocks, -1)


def dequantize(type_name: str, blocks: Tensor) -> Tensor:
    """The values of blocks: [blocks, bytes] uint8 -> [blocks, values] float32.

    Args:
        type_name: a key of `GROUPED_TYPES`.
        blocks: contiguous.
    """
    return GROUPED_TYPES[type_name](blocks).dense()


def why_unsupported(type_name: str) -> str | None:
    """Why tensors of a type are not read, and the remedy; None if they are."""
    if type_name in FLOAT_TYPES or type_name in GROUPED_TYPES:
        return None
    return (
        f"tensors of the type {type_name} are not supported; use a file of the same model as "
        "Q8_0, Q6_K, Q5_K_M, Q4_K_M or IQ4_XS"
    )


def _integers(type_name: str, blocks: Tensor) -> Tensor:
    values, least = block_values(blocks, type_name), BLOCK_LAYOUTS[type_name].least
    return values.view(torch.int8) - least if least else values


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n]: first all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bit_planes(packed: Tensor, bits: int) -> Tensor:
    """[blocks, n] bytes -> [blocks, 8 / bits, n]: the numbers of `bits` bits, lowest first."""
    shifts = range(0, 8, bits)
    return torch.stack([packed >> shift & ((1 << bits) - 1) for shift in shifts], 1)


def _looked_up(indices: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.int8)[indices.int()]


def _q2_k(blocks: Tensor) -> Grouped:
    factors = blocks[:, :16]
    # Two halves of 128 values, each with its 2-bit planes one after the other.
    values = _bit_planes(blocks[:, 16:80].reshape(-1, 32), 2).reshape(-1, 256)
    scales = half_at(blocks, 80) * (factors & 15).float()
    return Grouped(values, scales, -(half_at(blocks, 82) * (factors >> 4).float()))


def _q3_k(blocks: Tensor) -> Grouped:
    high, low = blocks[:, :32], blocks[:, 32:96]
    packed = blocks[:, 96:108]
    factors = _nibbles(packed[:, :8]) | _bit_planes(packed[:, 8:], 2).reshape(-1, 16) << 4
    values = _bit_planes(low.reshape(-1, 32), 2).reshape(-1, 256).to(torch.int8)
    is_clear = _bit_planes(high, 1).reshape(-1, 256).to(torch.int8) ^ 1
    scales = half_at(blocks, 108) * (factors.to(torch.int8) - 32).float()
    return Grouped(values - (is_clear << 2), scales, None)


def _unpacked(type_name: str) -> Callable[[Tensor], Grouped]:
    def decode(blocks: Tensor) -> Grouped:
        return Grouped(_integers(type_name, blocks), *block_factors(type_name, blocks))

    return decode


def _iq4_nl(blocks: Tensor) -> Grouped:
    return Grouped(_looked_up(_nibbles(blocks[:, 2:]), _NONLINEAR), half_at(blocks, 0), None)


def _iq4_xs(blocks: Tensor) -> Grouped:
    low = _bit_planes(blocks[:, 4:8], 4).transpose(1, 2).reshape(-1, 8)
    high = _bit_planes(blocks[:, 2:4], 2).transpose(1, 2).reshape(-1, 8)
    factors = (low | high << 4).to(torch.int8) - 32
    values = _nibbles(blocks[:, 8:].view(-1, 8, 16)).view(-1, 256)
    return Grouped(_looked_up(values, _NONLINEAR), half_at(blocks, 0) * factors.float(), None)


GROUPED_TYPES: dict[str, Callable[[Tensor], Grouped]] = {
    **{name: _unpacked(name) for name in BLOCK_LAYOUTS},
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
"""Quantised types -> the function that decodes their blocks [blocks, bytes] uint8."""
