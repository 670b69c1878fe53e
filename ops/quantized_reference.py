"""Quantised linear layers in plain torch: the reference for the C++ kernels of ops/quantized.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ostinato.ops.linear import PANEL

__all__ = (
    "QuantFormat",
    "dequantize_linear_weight",
    "quantize_linear_reference",
    "quantize_rows",
    "quantized_linear_reference",
    "quantized_rows_reference",
)

# As in native/quantized/pack.cpp: the parts of a group's range that the tried 4-bit grids keep.
_SPANS = (8.0, 7.0, 7.5, 8.5, 9.0)
_PARTS = (1.0, 0.95, 0.9, 0.85)
_LEAST = 2.0**-100  # activations below this are zero


class QuantFormat(NamedTuple):
    """How a weight is quantised."""

    bits: int  # 8 or 4
    group_size: int  # values of K that share a scale: 8 to 256, a multiple of 8
    symmetric: bool

    @property
    def offset(self) -> int:
        """The stored value that means zero in a symmetric group."""
        return 1 << (self.bits - 1)

    @property
    def name(self) -> str:
        """`int8 in groups of 128`, for people."""
        kind = "" if self.symmetric else "asymmetric "
        return f"{kind}int{self.bits} in groups of {self.group_size}"

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """[panels, bytes of a panel] of a quantised weight."""
        columns = -(-in_features // 8) * 8
        groups = -(-columns // self.group_size)
        header = PANEL * (2 if self.symmetric else 4)
        return -(-out_features // PANEL), groups * header + columns * PANEL * self.bits // 8


def dequantize_linear_weight(
    quantized: Tensor, form: QuantFormat, out_features: int, in_features: int
) -> Tensor:
    """The matrix [out_features, in_features] that a quantised weight stands for, in float32."""
    values, scales, zeros = _unpack(quantized, form, out_features, in_features)
    spread = [_spread(each, form, in_features) for each in (zeros, scales)]
    return (values - spread[0]) * spread[1]


def quantized_rows_reference(
    weight: Tensor,
    ids: Tensor,
    out_features: int,
    in_features: int,
    float32_output: bool,
    bits: int,
    group_size: int,
    symmetric: bool,
) -> Tensor:
    if bool(((ids < 0) | (ids >= out_features)).any()):
        raise ValueError(f"ids must be rows of the weight, 0 to {out_features - 1}, got {ids}")
    form = QuantFormat(bits, group_size, symmetric)
    rows = dequantize_linear_weight(weight, form, out_features, in_features)[ids]
    return rows if float32_output else rows.bfloat16()


def quantized_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    float32_output: bool,
    residual: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
) -> Tensor:
    """`quantized_linear` in plain torch, group by group."""
    form = QuantFormat(bits, group_size, symmetric)
    in_features = x.shape[1]
    values, scales, zeros = _unpack(weight, form, out_features, in_features)
    result = torch.zeros(x.shape[0], out_features)
    for group, begin in enumerate(range(0, in_features, group_size)):
        part = x[:, begin : begin + group_size].float()
        whole, row_scale = quantize_rows(part)
        steps = values[:, begin : begin + group_size] - zeros[:, group : group + 1]
        sums = (whole.double() @ steps.double().T).float()  # exact
        result = result + sums * (scales[:, group] * row_scale)
    if bias is not None:
        result = result + bias.float()
    if residual is not None:
        result = result + residual.float()
    return result if float32_output else result.to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers in [-127, 127] and scales [T, 1] of one group of activations [T, n] float32."""
    most = x.abs().amax(1, keepdim=True)
    finite = most.isfinite()
    usable = finite & (most >= _LEAST)
    whole = torch.where(usable, torch.round(x * (torch.full_like(most, 127.0) / most)), 0.0)
    return whole, torch.where(usable, most / 127.0, torch.where(finite, 0.0, torch.nan))


def _spread(by_group: Tensor, form: QuantFormat, in_features: int) -> Tensor:
    """[N, groups] -> [N, K]"""
    return by_group.repeat_interleave(form.group_size, 1)[:, :in_features]


def _unpack(
    quantized: Tensor, form: QuantFormat, out_features: int, in_features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N, K], scales and zero points [N, groups], all float32."""
    header = PANEL * (2 if form.symmetric else 4)
    columns = -(-in_features // 8) * 8
    values, scales, zeros = [], [], []
    position = 0
    for begin in range(0, columns, form.group_size):
        size = min(form.group_size, columns - begin)
        factors = quantized[:, position : position + header].contiguous().view(torch.bfloat16)
        position += header
        num_bytes = size * PANEL * form.bits // 8
        data = quantized[:, position : position + num_bytes]
        position += num_bytes
        if form.bits == 4:
            pairs = data.reshape(len(data), -1, 1, PANEL * 4)
            data = torch.cat((pairs & 15, pairs >> 4), 2)
        steps = data.reshape(len(data), -1, PANEL, 4)
        values.append(steps.transpose(1, 2).reshape(-1, size))
        scales.append(factors[:, :PANEL].reshape(-1, 1))
        zero = torch.zeros_like(scales[-1]) if form.symmetric else factors[:, PANEL:].reshape(-1, 1)
        zeros.append(zero + form.offset)
    return (
        torch.cat(values, 1)[:out_features, :in_features].float(),
        torch.cat(scales, 1)[:out_features].float(),
        torch.cat(zeros, 1)[:out_features].float(),
    )


def _away_from_zero(x: Tensor) -> Tensor:
    """Rounded to bfloat16 away from zero, so that the scale clips no value."""
    x = torch.where(x == 0.0, 0.0, x)  # without -0
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isnan(), x, ((bits + 0xFFFF) & -0x10000).view(torch.float32))


def _grids(low: Tensor, high: Tensor, form: QuantFormat) -> list[tuple[Tensor, Tensor]]:
    """(scales, values that stand for zero) to try for groups whose values lie in [low, high]."""
    offset = torch.full_like(low, form.offset)
    if form.symmetric:
        if form.bits == 8:
            return [(_away_from_zero(torch.maximum(-low, high) / 127.0), offset)]
        extreme = torch.where(-low > high, low, high)
        return [(_away_from_zero(extreme / -span), offset) for span in _SPANS]
    steps = float((1 << form.bits) - 1)
    grids = []
    for part in (1.0,) if form.bits == 8 else _PARTS:
        bottom = low.clamp(max=0.0) * part
        scale = _away_from_zero((high.clamp(min=0.0) * part - bottom) / steps)
        zero = torch.round(-bottom / scale).clamp(0.0, steps)
        grids.append((scale, torch.where(scale == 0.0, offset, zero)))
    return grids


def _on_grid(values: Tensor, scale: Tensor, zero: Tensor, form: QuantFormat) -> Tensor:
    factor = torch.where(scale == 0.0, 0.0, torch.ones_like(scale) / scale)
    return (torch.round(values * factor) + zero).clamp(0.0, float((1 << form.bits) - 1))


def _quantize_group(values: Tensor, form: QuantFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers [N, n], scales and zero values [N] of a group [N, n] float32."""
    grids = _grids(values.amin(1), values.amax(1), form)
    scale, zero = grids[0]
    best = torch.full_like(scale, torch.inf)
    for tried, its_zero in grids if len(grids) > 1 else []:
        error = torch.zeros_like(tried)
        for column in values.unbind(1):  # in order, as the kernel does
            difference = (_on_grid(column, tried, its_zero, form) - its_zero) * tried - column
            error = error + difference * difference
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, tried, scale)
        zero = torch.where(better, its_zero, zero)
    bad = ~values.isfinite().all(1)
    whole = _on_grid(values, scale[:, None], zero[:, None], form).nan_to_num()
    return whole, torch.where(bad, torch.nan, scale), zero


def quantize_linear_reference(
    weight: Tensor, bits: int, group_size: int, symmetric: bool
) -> Tensor:
    form = QuantFormat(bits, group_size, symmetric)
    rows, in_features = weight.shape
    padded = pad(weight.float(), (0, 0, 0, -rows % PANEL))
    panels = []
    for begin in range(0, in_features, group_size):
        group = padded[:, begin : begin + group_size]
        whole, scale, zero = _quantize_group(group, form)
        whole = pad(whole, (0, -whole.shape[1] % 8)).to(torch.uint8)
        steps = whole.view(len(padded) // PANEL, PANEL, -1, 4).transpose(1, 2)
        if bits == 4:
            steps = steps[:, 0::2] | steps[:, 1::2] << 4
        factors = [scale] if symmetric else [scale, zero - form.offset]
        header = torch.cat([each.view(-1, PANEL) for each in factors], 1).bfloat16()
        panels += [header.view(torch.uint8), steps.reshape(len(header), -1)]
    return torch.cat(panels, 1)
