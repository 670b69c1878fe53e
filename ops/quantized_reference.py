"""Quantised linear layers in plain torch: the reference for the C++ kernels of ops/quantized.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ostinato.ops.linear.packed_linear import PANEL

__all__ = (
    "E2M1",
    "QuantFormat",
    "dequantize_linear_weight",
    "pack_quantized_reference",
    "quantize_linear_reference",
    "quantize_rows",
    "quantized_linear_reference",
    "quantized_rows_reference",
)

# The grids that are tried for groups of 4 bits, as in ops/native/quantized/pack.cpp. The scale of a
# symmetric group is its value of largest magnitude divided by one of _SPANS. An asymmetric group
# keeps one of _PARTS of its range.
_SPANS = (8.0, 7.0, 7.5, 8.5, 9.0)
_PARTS = (1.0, 0.95, 0.9, 0.85)
_LEAST = 2.0**-100  # a group whose activations are all smaller becomes zeros
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the floats of 4 bits with 2 bits of exponent and 1 of mantissa, plus 12."""
_FACTORS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class QuantFormat(NamedTuple):
    """How a weight is quantised."""

    bits: int  # 8 or 4
    group_size: int  # values of K that share a scale: 8 to 256, a multiple of 8
    symmetric: bool  # no zero points
    scales: str = "bfloat16"  # the dtype of scales, zero points and minimums: also float16, float32
    kind: str = "steps"  # or "minimums", "e2m1", "e4m3". A value stands for:
    #   steps     (value - zero point) * scale
    #   minimums  value * scale - minimum
    #   e2m1      (E2M1[value] - 12) * scale; the bracket is twice a float, so scales are halved
    #   e4m3      value * scale; values are floats of 8 bits, and activations are not rounded

    @property
    def offset(self) -> int:
        """The value that stands for zero in a symmetric group (for e2m1 an entry of `E2M1`)."""
        return {"minimums": 0, "e2m1": 12, "e4m3": 0}.get(self.kind, 1 << (self.bits - 1))

    @property
    def factors(self) -> torch.dtype:
        """The dtype of the scales, zero points and minimums."""
        return _FACTORS[self.scales]

    @property
    def header_bytes(self) -> int:
        """Bytes of a group of a panel before its values."""
        return PANEL * self.factors.itemsize * (1 if self.symmetric else 2)

    @property
    def name(self) -> str:
        """The format for messages, such as `int8 in groups of 128`."""
        if self.kind in ("e2m1", "e4m3"):
            return f"floats of {self.bits} bits in groups of {self.group_size}"
        kind = "" if self.symmetric else "asymmetric "
        return f"{kind}int{self.bits} in groups of {self.group_size}"

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """[panels, bytes of a panel] of a quantised weight."""
        columns = -(-in_features // 8) * 8
        groups = -(-columns // self.group_size)
        values = columns * PANEL * self.bits // 8
        return -(-out_features // PANEL), groups * self.header_bytes + values


def dequantize_linear_weight(
    quantized: Tensor, form: QuantFormat, out_features: int, in_features: int
) -> Tensor:
    """The matrix [out_features, in_features] that a quantised weight stands for, in float32."""
    values, *factors = _unpack(quantized, form, out_features, in_features)
    scales, zeros = [_spread(each, form, in_features) for each in factors]
    return values * scales - zeros if form.kind == "minimums" else (values - zeros) * scales


def quantized_rows_reference(
    weight: Tensor,
    ids: Tensor,
    out_features: int,
    in_features: int,
    float32_output: bool,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> Tensor:
    """`quantized_rows` in plain torch."""
    if bool(((ids < 0) | (ids >= out_features)).any()):
        raise ValueError(f"ids must be rows of the weight, 0 to {out_features - 1}, got {ids}")
    form = QuantFormat(bits, group_size, symmetric, scales, kind)
    rows = dequantize_linear_weight(weight, form, out_features, in_features)[ids]
    return rows if float32_output else rows.bfloat16()


def quantized_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    float32_output: bool,
    residual: Tensor | None,
    order: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> Tensor:
    """`quantized_linear` in plain torch, group by group."""
    form = QuantFormat(bits, group_size, symmetric, scales, kind)
    in_features = x.shape[1]
    values, scale, zero = _unpack(weight, form, out_features, in_features)
    ordered = x if order is None else x[:, order.long()]
    result = torch.zeros(x.shape[0], out_features)
    for group, begin in enumerate(range(0, in_features, group_size)):
        part = ordered[:, begin : begin + group_size].float()
        if form.kind == "e4m3":
            sums = part @ values[:, begin : begin + group_size].T
            result = result + sums * scale[:, group]
            continue
        whole, row_scale = quantize_rows(part)
        steps = values[:, begin : begin + group_size]
        if form.kind == "minimums":
            least = zero[:, group] * row_scale * whole.sum(1, keepdim=True)
            result = result - least
        else:
            steps = steps - zero[:, group : group + 1]
        sums = (whole.double() @ steps.double().T).float()  # exact
        result = result + sums * (scale[:, group] * row_scale)
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
    header = form.header_bytes
    columns = -(-in_features // 8) * 8
    values, scales, zeros = [], [], []
    position = 0
    for begin in range(0, columns, form.group_size):
        size = min(form.group_size, columns - begin)
        factors = quantized[:, position : position + header].contiguous().view(form.factors)
        position += header
        num_bytes = size * PANEL * form.bits // 8
        data = quantized[:, position : position + num_bytes]
        position += num_bytes
        if form.bits == 4:
            pairs = data.reshape(len(data), -1, 1, PANEL * 4)
            data = torch.cat((pairs & 15, pairs >> 4), 2)
        if form.kind == "e2m1":
            data = torch.tensor(E2M1, dtype=torch.uint8, device=data.device)[data.long()]
        if form.kind == "e4m3":
            data = data.contiguous().view(torch.float8_e4m3fn).float()
        steps = data.reshape(len(data), -1, PANEL, 4)
        values.append(steps.transpose(1, 2).reshape(-1, size))
        factors = factors.float()
        scales.append(factors[:, :PANEL].reshape(-1, 1))
        zero = torch.zeros_like(scales[-1]) if form.symmetric else factors[:, PANEL:].reshape(-1, 1)
        zeros.append(zero + form.offset)
    return (
        torch.cat(values, 1)[:out_features, :in_features].float(),
        torch.cat(scales, 1)[:out_features],
        torch.cat(zeros, 1)[:out_features],
    )


def _away_from_zero(x: Tensor) -> Tensor:
    """Rounded to bfloat16 away from zero, so that the scale clips no value."""
    x = torch.where(x == 0.0, 0.0, x)  # without -0
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isnan(), x, ((bits + 0xFFFF) & -0x10000).view(torch.float32))


def _grids(low: Tensor, high: Tensor, form: QuantFormat) -> list[tuple[Tensor, Tensor]]:
    """(scales, values that stand for zero) of each grid to try for values in [low, high]."""
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
    weight: Tensor, bits: int, group_size: int, symmetric: bool, scales: str, kind: str
) -> Tensor:
    """`quantize_linear_weight` in plain torch."""
    form = QuantFormat(bits, group_size, symmetric, scales, kind)
    padded = pad(weight.float(), (0, 0, 0, -weight.shape[0] % PANEL))
    quantized = [_quantize_group(group, form) for group in padded.split(group_size, 1)]
    whole, scale, zero = zip(*quantized, strict=True)
    zeros = None if symmetric else torch.stack(zero, 1)
    return pack_quantized_reference(
        torch.cat(whole, 1).to(torch.uint8), torch.stack(scale, 1), zeros, *form
    )


def pack_quantized_reference(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    kind: str,
) -> Tensor:
    """`pack_quantized_weight` in plain torch, group by group."""
    form = QuantFormat(bits, group_size, symmetric, scale_dtype, kind)
    rows = -values.shape[0] % PANEL
    padded = pad(values, (0, 0, 0, rows))
    factors = [pad(scales, (0, 0, 0, rows))]
    if zeros is not None:
        factors.append(pad(zeros - form.offset, (0, 0, 0, rows)))
    panels = []
    for group, part in enumerate(padded.split(group_size, 1)):
        part = pad(part, (0, -part.shape[1] % 8))
        steps = part.reshape(len(padded) // PANEL, PANEL, -1, 4).transpose(1, 2)
        if bits == 4:
            steps = steps[:, 0::2] | steps[:, 1::2] << 4
        header = torch.cat([each[:, group].reshape(-1, PANEL) for each in factors], 1)
        header = header.to(form.factors)
        panels += [header.view(torch.uint8), steps.reshape(len(header), -1)]
    return torch.cat(panels, 1)
