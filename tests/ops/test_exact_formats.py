"""Weights whose integers and scales come from a checkpoint: what is stored is what is multiplied.

The packed bytes and the restored weights are compared bit for bit with plain torch. A product may
differ from the reference's by 1e-5 of the sum of its terms' magnitudes.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ostinato.ops.quantized import pack_quantized_weight, quantized_linear
from ostinato.ops.quantized_reference import (
    QuantFormat,
    dequantize_linear_weight,
    pack_quantized_reference,
    quantized_linear_reference,
)
from tests.ops.kernel_checks import EACH_LEVEL, ops_of

_FORMATS = [
    QuantFormat(4, 128, True, "float16"),
    QuantFormat(4, 32, False, "float16"),
    QuantFormat(8, 64, False, "float16"),
    QuantFormat(8, 256, True, "float32"),
    QuantFormat(4, 64, False, "bfloat16"),
    QuantFormat(4, 32, False, "float32", "minimums"),
    QuantFormat(8, 16, False, "float32", "minimums"),
    QuantFormat(4, 32, True, "bfloat16", "e2m1"),
    QuantFormat(4, 16, True, "float32", "e2m1"),
    QuantFormat(8, 128, True, "float32", "e4m3"),
    QuantFormat(8, 24, True, "bfloat16", "e4m3"),
    QuantFormat(8, 32, True, "float16", "e4m3"),
]
_SHAPES = [(33, 40), (64, 256), (65, 1061)]
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _name(form: QuantFormat) -> str:
    zeros = "sym" if form.symmetric else "asym"
    return f"{form.kind}{form.bits}-{form.group_size}-{form.scales}-{zeros}"


def stored(
    rows: int, columns: int, form: QuantFormat
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Random integers, scales and zero points, and the weights that they stand for."""
    generator = torch.Generator().manual_seed(rows + columns + form.bits)
    groups = -(-columns // form.group_size)
    values = torch.randint(0, 1 << form.bits, (rows, columns), generator=generator).to(torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5).to(form.factors).float() / 64
    group = torch.arange(columns) // form.group_size
    if form.kind == "e2m1":
        table = torch.tensor(_E2M1 + [-value for value in _E2M1])
        return values, scales, None, table[values.long()] * (2 * scales)[:, group]
    if form.kind == "e4m3":
        values = values - ((values & 127) == 127).to(torch.uint8)  # without NaN
        restored = values.view(torch.float8_e4m3fn).float() * scales[:, group]
        return values, scales, None, restored
    if form.symmetric:
        return values, scales, None, (values - float(form.offset)) * scales[:, group]
    if form.kind == "minimums":
        minimums = torch.rand(rows, groups, generator=generator)
        restored = values * scales[:, group] - minimums[:, group]
        return values, scales, minimums, restored
    zeros = torch.randint(0, 1 << form.bits, (rows, groups), generator=generator).float()
    zeros[0], zeros[-1] = 0.0, float((1 << form.bits) - 1)  # the extremes are stored exactly
    return values, scales, zeros, (values - zeros[:, group]) * scales[:, group]


def _kernels(level: str) -> SimpleNamespace:
    names = {"pack": "pack_quantized", "linear": "quantized_linear", "rows": "quantized_rows"}
    return ops_of("quantized", level, **names)


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
@pytest.mark.parametrize("level", EACH_LEVEL)
def test_what_is_stored_is_restored_bit_for_bit(level: str, form: QuantFormat) -> None:
    kernels = _kernels(level)
    for shape in _SHAPES:
        values, scales, zeros, expected = stored(*shape, form)
        packed = kernels.pack(values, scales, zeros, *form)
        assert torch.equal(packed, pack_quantized_reference(values, scales, zeros, *form))
        # GPTQ's tensors are transposed in memory.
        assert torch.equal(packed, kernels.pack(values.T.contiguous().T, scales, zeros, *form))
        assert torch.equal(dequantize_linear_weight(packed, form, *shape), expected)
        none = None if zeros is None else zeros[:0]
        assert kernels.pack(values[:0], scales[:0], none, *form).shape == (0, packed.shape[1])
        ids = torch.arange(shape[0])
        assert torch.equal(kernels.rows(packed, ids, *shape, True, *form), expected)


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", EACH_LEVEL)
def test_products_with_and_without_an_order(
    level: str, dtype: torch.dtype, form: QuantFormat
) -> None:
    kernels = _kernels(level)
    for out_features, in_features in _SHAPES:
        values, scales, zeros, restored = stored(out_features, in_features, form)
        packed = pack_quantized_reference(values, scales, zeros, *form)
        generator = torch.Generator().manual_seed(in_features)
        x = torch.randn(100, in_features, generator=generator).to(dtype)
        order = torch.randperm(in_features, generator=generator).int()
        bias = torch.randn(out_features, generator=generator).to(dtype)
        whole = kernels.linear(x, packed, bias, out_features, True, None, order, *form)
        reference = quantized_linear_reference(
            x, packed, bias, out_features, True, None, order, *form
        )
        magnitude = x[:, order.long()].float().abs() @ restored.abs().T + bias.float().abs()
        if form.kind == "minimums":  # a group's two terms may be larger than their difference
            magnitude = magnitude + 2 * form.group_size * x.float().abs().amax()
        assert bool(((whole - reference).abs() <= 1e-5 * magnitude).all())
        for rows in (1, 2, 7, 8, 9, 48):
            part = kernels.linear(x[-rows:], packed, bias, out_features, True, None, order, *form)
            assert torch.equal(part, whole[-rows:])
        gathered = x[:, order.long()]
        same = kernels.linear(gathered, packed, bias, out_features, True, None, None, *form)
        assert torch.equal(same, whole)


@pytest.mark.parametrize("group_size", [24, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", EACH_LEVEL)
def test_every_float_of_8_bits_is_widened_exactly(
    level: str, dtype: torch.dtype, group_size: int
) -> None:
    """Each row of the unit matrix picks one value of each weight row, whatever its group."""
    form = QuantFormat(8, group_size, True, "float32", "e4m3")
    columns = 300  # groups of 24 end within a tile, and the last group of each size is shorter
    codes = (torch.arange(columns)[None, :] + torch.arange(35)[:, None] * 37) % 256
    codes = codes.where((codes & 127) != 127, 0).to(torch.uint8)  # without NaN
    scales = torch.full((35, -(-columns // group_size)), 0.75)
    expected = (codes.view(torch.float8_e4m3fn).float() * 0.75).T
    packed = pack_quantized_reference(codes, scales, None, *form)
    linear = _kernels(level).linear
    x = torch.eye(columns, dtype=dtype)
    for rows in (1, 20, 40, columns):
        product = linear(x[:rows], packed, None, 35, True, None, None, *form)
        assert torch.equal(product, expected[:rows])


def test_bad_arguments_are_refused() -> None:
    form = QuantFormat(4, 32, False, "float16")
    values, scales, zeros, _ = stored(40, 64, form)
    packed = pack_quantized_weight(values, scales, zeros, form)
    with pytest.raises(ValueError, match="zero points are given unless the format is symmetric"):
        pack_quantized_weight(values, scales, None, form)
    with pytest.raises(ValueError, match=r"scales and zero points must be float32 \[40, 2\]"):
        pack_quantized_weight(values, scales[:, :1], zeros, form)
    with pytest.raises(ValueError, match="values must be a matrix of uint8"):
        pack_quantized_weight(values.int(), scales, zeros, form)
    with pytest.raises(ValueError, match="scales must be bfloat16, float16 or float32, got int8"):
        pack_quantized_weight(values, scales, zeros, QuantFormat(4, 32, False, "int8"))
    with pytest.raises(ValueError, match="of steps with minimums, or of symmetric e2m1"):
        pack_quantized_weight(values, scales, zeros, form._replace(kind="e2m1"))
    x = torch.zeros(3, 64)
    with pytest.raises(ValueError, match="order must be a contiguous int32 vector with an element"):
        quantized_linear(x, packed, None, 40, form, order=torch.arange(63).int())
    for wrong in (-1, 64):
        order = torch.arange(64).int()
        order[5] = wrong
        with pytest.raises(ValueError, match="order must consist of columns of x, 0 to 63"):
            quantized_linear(x, packed, None, 40, form, order=order)


@pytest.mark.parametrize("form", _FORMATS[:1] + _FORMATS[5:10], ids=_name)
def test_the_registrations_pass_opcheck(form: QuantFormat) -> None:
    values, scales, zeros, _ = stored(45, 21, form)
    ops = torch.ops.ostinato
    torch.library.opcheck(ops.pack_quantized.default, (values, scales, zeros, *form))
    packed = pack_quantized_weight(values, scales, zeros, form)
    order = torch.randperm(21).int()
    torch.library.opcheck(
        ops.quantized_linear.default,
        (torch.randn(5, 21), packed, None, 45, False, None, order, *form),
    )
