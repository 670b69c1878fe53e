"""The Triton kernels of quantised weights under Triton's interpreter, against dequantised matrices.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
Products are of float32 and float16: the interpreter multiplies no bfloat16.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from ostinato.ops.gpu_quantized.triton_quantized_linear import (
    few_rows_launch,
    many_rows_launch,
    quantized_linear_on_cuda,
)
from ostinato.ops.gpu_quantized.triton_quantized_moe import quantized_moe_on_cuda
from ostinato.ops.gpu_quantized.triton_quantized_rows import quantized_rows_on_cuda
from ostinato.ops.quantized_reference import (
    QuantFormat,
    dequantize_linear_weight,
    pack_quantized_reference,
)

FORMS = [
    QuantFormat(4, 32, True, "float16"),
    QuantFormat(4, 128, False, "float16"),
    QuantFormat(8, 64, False),
    QuantFormat(8, 256, True, "float16"),
    QuantFormat(4, 16, True, "float32", "e2m1"),
    QuantFormat(4, 32, False, "float32", "minimums"),
    QuantFormat(8, 32, False, "float16", "minimums"),
    QuantFormat(8, 128, True, "float32", "e4m3"),
    QuantFormat(4, 96, True),  # no power of two
    QuantFormat(8, 24, True, "float16"),
]
OUT, IN = 70, 164  # no multiples of a panel, of a group or of 8


def stored(form: QuantFormat, seed: int, size: tuple[int, int] = (OUT, IN)) -> Tensor:
    """Random bytes of a weight."""
    generator = torch.Generator().manual_seed(seed)
    high = 1 << form.bits
    values = torch.randint(0, high, size, generator=generator, dtype=torch.uint8)
    if form.kind == "e4m3":
        values = torch.where((values & 127) == 127, 0, values)  # no NaN
    groups = -(-size[1] // form.group_size)
    scales = (torch.rand(size[0], groups, generator=generator) + 0.5) / high
    zeros = torch.randint(0, high, (size[0], groups), generator=generator).float()
    if form.kind == "minimums":
        zeros = zeros / high
    if form.kind == "e4m3":
        scales = scales / 100
    return pack_quantized_reference(values, scales, None if form.symmetric else zeros, *form)


def problem(form: QuantFormat, rows: int, dtype: torch.dtype) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(rows)
    weight = stored(form, rows)
    return SimpleNamespace(
        x=torch.randn(rows, IN + 3, generator=generator).to(dtype)[:, :IN],
        weight=weight,
        matrix=dequantize_linear_weight(weight, form, OUT, IN),
        bias=torch.randn(OUT, generator=generator).to(dtype),
        residual=torch.randn(rows, OUT, generator=generator).to(dtype),
        order=torch.randperm(IN, generator=generator).int(),
    )


def check(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Check a result that is a float32 sum of 164 products, rounded once."""
    assert got.dtype == dtype
    tolerance = {torch.float32: 2e-4, torch.float16: 2e-2}[dtype]
    torch.testing.assert_close(got.double(), exact, atol=tolerance, rtol=tolerance / 10)


def check_rows(form: QuantFormat, rows: int, dtype: torch.dtype) -> None:
    p = problem(form, rows, dtype)
    whole = (p.x.double() @ p.matrix.double().T) + p.bias.double() + p.residual.double()
    given = (p.x, p.weight, p.bias, OUT, False, p.residual, None, form)
    check(quantized_linear_on_cuda(*given), whole, dtype)
    ordered = p.x[:, p.order.long()].double() @ p.matrix.double().T
    given = (p.x, p.weight, None, OUT, True, None, p.order, form)
    check(quantized_linear_on_cuda(*given), ordered, torch.float32)


@pytest.mark.parametrize(("form", "rows"), [(FORMS[7], 1), (FORMS[5], 6)], ids=str)
def test_products(form: QuantFormat, rows: int) -> None:
    check_rows(form, rows, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name} {form.kind}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 33, 130])
def test_products_of_every_format(form: QuantFormat, rows: int, dtype: torch.dtype) -> None:
    check_rows(form, rows, dtype)


@pytest.mark.parametrize(
    "form",
    [form if form in FORMS[:6:2] else pytest.param(form, marks=pytest.mark.slow) for form in FORMS],
)
def test_rows_are_the_dequantised_ones(form: QuantFormat) -> None:
    weight = stored(form, 5)
    ids = torch.tensor([0, OUT - 1, 33, 0])
    got = quantized_rows_on_cuda(weight, ids, OUT, IN, torch.float32, form)
    assert torch.equal(got, dequantize_linear_weight(weight, form, OUT, IN)[ids])
    assert quantized_rows_on_cuda(weight, ids[:0], OUT, IN, torch.float32, form).shape == (0, IN)


@pytest.mark.slow
@pytest.mark.parametrize("form", [FORMS[0], FORMS[7]], ids=lambda form: form.name)
def test_rows_of_a_weight_of_more_than_2_31_bytes(
    form: QuantFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets of 32 bits would wrap around. Only the pages of the last panel become memory."""
    # The interpreter copies every storage back, which is the same memory here.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)
    panel = stored(form, 3, (32, 8192))
    first = (1 << 31) // panel.numel() + 1
    weight = torch.empty((first + 1, panel.numel()), dtype=torch.uint8)
    weight[first:] = panel
    ids = torch.tensor([0, 31])
    got = quantized_rows_on_cuda(
        weight, ids + first * 32, first * 32 + 32, 8192, torch.float32, form
    )
    assert torch.equal(got, dequantize_linear_weight(panel, form, 32, 8192)[ids])


@pytest.mark.parametrize(
    ("form", "tokens", "slots"),
    [
        (FORMS[4], 3, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((FORMS[4], 5, 2), (FORMS[1], 30, 1))
        ),
    ],
)
def test_experts(form: QuantFormat, tokens: int, slots: int) -> None:
    experts = 3
    weight = torch.stack([stored(form, seed) for seed in range(experts)])
    matrices = [dequantize_linear_weight(each, form, OUT, IN).double() for each in weight]
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, IN, generator=generator)
    bias = torch.randn(experts, OUT, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots].int()
    products = torch.stack([x.double() @ matrix.T for matrix in matrices], 1) + bias.double()
    each = products[torch.arange(tokens)[:, None], ids.long()]  # [tokens, slots, OUT]
    given = (x, ids, weight, bias, OUT)
    check(quantized_moe_on_cuda(*given, None, None, form), each.flatten(0, 1), torch.float32)
    routing = torch.rand(tokens, slots, generator=generator)
    residual = torch.randn(tokens, OUT, generator=generator)
    whole = (each * routing[:, :, None]).sum(1) + residual
    check(quantized_moe_on_cuda(*given, routing, residual, form), whole, torch.float32)


def test_narrow_results_are_divided_along_the_columns() -> None:
    form = FORMS[0]
    assert few_rows_launch(form, 1, 28672, 4096).grid == (896, 1, 1)
    assert few_rows_launch(form, 1, 1024, 4096).grid == (32, 1, 8)
    assert many_rows_launch(form, 16, 4096, 4096, torch.bfloat16).grid == (64, 1, 4)
    assert many_rows_launch(form, 4096, 4096, 4096, torch.bfloat16).grid == (32, 32, 1)


def test_what_the_kernels_do_not_read_is_refused() -> None:
    form = FORMS[0]
    p = problem(form, 2, torch.float32)
    for message, x, weight in (
        ("x is torch.float64", p.x.double(), p.weight),
        ("rows must be contiguous", p.x.T.contiguous().T, p.weight),
        ("the weight has shape", p.x, p.weight[:, :-4]),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_linear_on_cuda(x, weight, None, OUT, False, None, None, form)
