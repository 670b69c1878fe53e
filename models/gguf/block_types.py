"""The tensor types of GGUF files: decodes their blocks of bytes into integers and scales.

A row of a quantised tensor is a sequence of blocks of 32 or 256 values. Each type has a function
that decodes blocks into integers. Each group of integers has a scale, and for some types a shift:

    value = integer * scale + shift

The formula and the layouts are those of llama.cpp's ggml-quants.c. If it is evaluated in float32 in
this order, the result has the same bits as the `dequantize` functions of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ("FLOAT_TYPES", "GROUPED_TYPES", "Grouped", "dequantize", "why_unsupported")

FLOAT_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types whose tensors hold floats -> their dtype."""

# The 16 values of IQ4_NL and IQ4_XS, and those of MXFP4 times 2.
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_TIMES_2 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


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


def _half(blocks: Tensor, begin: int) -> Tensor:
    """The float16 number at a byte of each block: [blocks, 1] float32."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n]: first all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bit_planes(packed: Tensor, bits: int) -> Tensor:
    """[blocks, n] bytes -> [blocks, 8 / bits, n]: the numbers of `bits` bits, lowest first."""
    shifts = range(0, 8, bits)
    return torch.stack([packed >> shift & ((1 << bits) - 1) for shift in shifts], 1)


def _looked_up(indices: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.int8)[indices.int()]


def _q4_0(blocks: Tensor) -> Grouped:
    return Grouped(_nibbles(blocks[:, 2:]).to(torch.int8) - 8, _half(blocks, 0), None)


def _q4_1(blocks: Tensor) -> Grouped:
    return Grouped(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(blocks: Tensor, begin: int) -> Tensor:
    """32 bits, the lowest of the first byte first, as values of 0 or 16."""
    bits = _bit_planes(blocks[:, begin : begin + 4], 1)
    return bits.transpose(1, 2).reshape(-1, 32) << 4


def _q5_0(blocks: Tensor) -> Grouped:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return Grouped(values.to(torch.int8) - 16, _half(blocks, 0), None)


def _q5_1(blocks: Tensor) -> Grouped:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return Grouped(values, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Grouped:
    return Grouped(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None)


def _q2_k(blocks: Tensor) -> Grouped:
    factors = blocks[:, :16]
    # Two halves of 128 values, each with its 2-bit planes one after the other.
    values = _bit_planes(blocks[:, 16:80].reshape(-1, 32), 2).reshape(-1, 256)
    scales = _half(blocks, 80) * (factors & 15).float()
    return Grouped(values, scales, -(_half(blocks, 82) * (factors >> 4).float()))


def _q3_k(blocks: Tensor) -> Grouped:
    high, low = blocks[:, :32], blocks[:, 32:96]
    packed = blocks[:, 96:108]
    factors = _nibbles(packed[:, :8]) | _bit_planes(packed[:, 8:], 2).reshape(-1, 16) << 4
    values = _bit_planes(low.reshape(-1, 32), 2).reshape(-1, 256).to(torch.int8)
    is_clear = _bit_planes(high, 1).reshape(-1, 256).to(torch.int8) ^ 1
    scales = _half(blocks, 108) * (factors.to(torch.int8) - 32).float()
    return Grouped(values - (is_clear << 2), scales, None)


def _k_factors(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes (Q4_K, Q5_K): each [blocks, 8]."""
    scale, least, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((scale & 63, rest & 15 | scale >> 2 & 48), 1)
    minima = torch.cat((least & 63, rest >> 4 | least >> 2 & 48), 1)
    return scales.float(), minima.float()


def _k_grouped(blocks: Tensor, values: Tensor) -> Grouped:
    scales, minima = _k_factors(blocks[:, 4:16])
    return Grouped(values, _half(blocks, 0) * scales, -(_half(blocks, 2) * minima))


def _q4_k(blocks: Tensor) -> Grouped:
    return _k_grouped(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 256))


def _q5_k(blocks: Tensor) -> Grouped:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 256)
    return _k_grouped(blocks, low | _bit_planes(blocks[:, 16:48], 1).view(-1, 256) << 4)


def _q6_k(blocks: Tensor) -> Grouped:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 256)
    high = _bit_planes(blocks[:, 128:192].reshape(-1, 32), 2).view(-1, 256)
    factors = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Grouped((low | high << 4).to(torch.int8) - 32, _half(blocks, 208) * factors, None)


def _iq4_nl(blocks: Tensor) -> Grouped:
    return Grouped(_looked_up(_nibbles(blocks[:, 2:]), _NONLINEAR), _half(blocks, 0), None)


def _iq4_xs(blocks: Tensor) -> Grouped:
    low = _bit_planes(blocks[:, 4:8], 4).transpose(1, 2).reshape(-1, 8)
    high = _bit_planes(blocks[:, 2:4], 2).transpose(1, 2).reshape(-1, 8)
    factors = (low | high << 4).to(torch.int8) - 32
    values = _nibbles(blocks[:, 8:].view(-1, 8, 16)).view(-1, 256)
    return Grouped(_looked_up(values, _NONLINEAR), _half(blocks, 0) * factors.float(), None)


def _mxfp4(blocks: Tensor) -> Grouped:
    exponent = blocks[:, :1].int()
    # 2 ** (exponent - 128), as bits; the two smallest are subnormal numbers.
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    values = _looked_up(_nibbles(blocks[:, 1:]), _E2M1_TIMES_2)
    return Grouped(values, bits.int().view(torch.float32), None)


GROUPED_TYPES: dict[str, Callable[[Tensor], Grouped]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Quantised types -> the function that decodes their blocks [blocks, bytes] uint8."""
