"""The Triton kernels for operands of 8 bits under Triton's interpreter, against the formula.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from ostinato.ops.w8a8.round_rows import InputScales, round_rows
from ostinato.ops.w8a8.triton_round_rows import round_rows_on_cuda
from ostinato.ops.w8a8.triton_w8a8_linear import (
    Operands,
    fits_scaled_mm,
    w8a8_linear_launch,
    w8a8_linear_on_cuda,
)
from ostinato.ops.w8a8.triton_w8a8_moe import w8a8_moe_on_cuda
from tests.ops.exact_fp8 import convert_exactly

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
ROW, GROUP, STATIC = InputScales
OUT, IN = 70, 164  # no multiples of a tile, of a group or of 16
FORMS = [  # dtype, columns of a group, what shares a scale, whether scales are powers of two
    (E4M3, IN, ROW, False),
    (E4M3, IN, STATIC, False),
    (E4M3, 128, GROUP, False),
    (E4M3, 64, GROUP, True),
    (INT8, IN, ROW, False),
    (INT8, 32, ROW, False),
    (INT8, IN, STATIC, False),
]
Form = tuple[torch.dtype, int, InputScales, bool]


@pytest.fixture(autouse=True)
def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = convert_exactly(interpreter._convert_float)
    monkeypatch.setattr(interpreter, "_convert_float", convert)


def matrix(form: Form, seed: int) -> tuple[Tensor, Tensor]:
    """A weight of 8 bits and its scales."""
    generator = torch.Generator().manual_seed(seed)
    dtype, size, _, _ = form
    weight = torch.randn(OUT, IN, generator=generator) * (100 if dtype == E4M3 else 40)
    scales = (torch.rand(-(-IN // size), OUT, generator=generator) + 0.5) / 1000
    return weight.clamp(-127, 127).to(dtype), scales


def problem(form: Form, rows: int, dtype: torch.dtype) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(rows)
    weight, scales = matrix(form, rows)
    x = torch.randn(rows, IN + 3, generator=generator)
    x[:, 7] *= 50  # an outlier
    return SimpleNamespace(
        x=x.to(dtype)[:, :IN],
        weight=weight,
        scales=scales,
        given=torch.tensor([0.01, 0.04, 0.02]) if form[2] is STATIC else None,
        bias=torch.randn(OUT, generator=generator).to(dtype),
        residual=torch.randn(rows, OUT, generator=generator).to(dtype),
    )


def restored(values: Tensor, scales: Tensor, size: int) -> Tensor:
    """Rounded values times their scales, in float64."""
    spread = scales if scales.shape[1] == 1 else scales.repeat_interleave(size, 1)
    return values.double() * spread[:, : values.shape[1]].double()


def dense(p: SimpleNamespace, form: Form) -> Tensor:
    return p.weight.double() * p.scales.T.repeat_interleave(form[1], 1)[:, :IN].double()


def rounded(p: SimpleNamespace, form: Form) -> Tensor:
    dtype, size, inputs, powers = form
    return restored(*round_rows(p.x, dtype, inputs, size, p.given, powers=powers), size)


def check(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    tolerance = {torch.float32: 2e-4, torch.float16: 2e-2}[dtype]
    torch.testing.assert_close(got.double(), exact, atol=tolerance, rtol=tolerance / 10)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounding_has_the_bits_of_the_formula(form: Form, dtype: torch.dtype) -> None:
    target, size, inputs, powers = form
    x = problem(form, 6, dtype).x.clone()
    x[1] = 0
    x[2, 5] = torch.inf
    x[3, 150] = torch.nan
    x[4] *= 1e-7
    given = torch.tensor([0.004, 0.04]) if inputs is STATIC else None
    values, scales = round_rows_on_cuda(x, target, inputs, size, given, powers=powers)
    expected, its_scales = round_rows(x, target, inputs, size, given, powers=powers)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.nan_to_num(-1.0), its_scales.nan_to_num(-1.0))
    assert scales.isnan().any(1).tolist() == [False, False, True, True, False, False]


def check_products(form: Form, rows: int, dtype: torch.dtype) -> None:
    p = problem(form, rows, dtype)
    _, size, inputs, powers = form
    product = rounded(p, form) @ dense(p, form).T
    given = (p.x, p.weight, p.scales, p.given)
    got = w8a8_linear_on_cuda(*given, p.bias, p.residual, False, size, inputs, powers)
    check(got, product + p.bias.double() + p.residual.double(), dtype)
    got = w8a8_linear_on_cuda(*given, None, None, True, size, inputs, powers)
    check(got, product, torch.float32)


@pytest.mark.parametrize(("form", "rows"), [(FORMS[0], 3), (FORMS[2], 5), (FORMS[4], 1)], ids=str)
def test_products(form: Form, rows: int) -> None:
    check_products(form, rows, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 40, 130])
def test_products_of_every_form(form: Form, rows: int, dtype: torch.dtype) -> None:
    check_products(form, rows, dtype)


@pytest.mark.parametrize(
    ("form", "tokens", "slots"),
    [(FORMS[2], 5, 2), *(pytest.param(form, 30, 1, marks=pytest.mark.slow) for form in FORMS)],
    ids=str,
)
def test_experts(form: Form, tokens: int, slots: int) -> None:
    experts = 3
    _, size, inputs, powers = form
    p = problem(form, tokens, torch.float32)
    stored = [matrix(form, seed) for seed in range(experts)]
    weight, scales = torch.stack([w for w, _ in stored]), torch.stack([s for _, s in stored])
    generator = torch.Generator().manual_seed(tokens)
    bias = torch.randn(experts, OUT, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots].int()
    matrices = [dense(SimpleNamespace(weight=w, scales=s), form) for w, s in stored]
    x = rounded(p, form)
    products = torch.stack([x @ each.T for each in matrices], 1) + bias.double()
    each = products[torch.arange(tokens)[:, None], ids.long()]
    given = (p.x, ids, weight, scales, p.given, bias)
    got = w8a8_moe_on_cuda(*given, None, None, size, inputs, powers)
    check(got, each.flatten(0, 1), torch.float32)
    routing = torch.rand(tokens, slots, generator=generator)
    whole = (each * routing[:, :, None]).sum(1) + p.residual
    got = w8a8_moe_on_cuda(*given, routing, p.residual, size, inputs, powers)
    check(got, whole, torch.float32)


def test_the_path_depends_on_shapes_alone() -> None:
    operands = Operands(4096, 4096, 4096, ROW, E4M3)
    assert w8a8_linear_launch(operands, 1).grid == (64, 1, 4)
    assert w8a8_linear_launch(operands, 64).grid == (32, 1, 8)
    assert not fits_scaled_mm(operands, 64, torch.bfloat16)
    assert fits_scaled_mm(operands, 65, torch.bfloat16)
    for other in (
        operands._replace(out_features=4100),
        operands._replace(group_size=128, inputs=GROUP),
        operands._replace(dtype=INT8),
    ):
        assert not fits_scaled_mm(other, 65, torch.bfloat16)
    assert not fits_scaled_mm(operands, 65, torch.float32)


def test_what_the_kernels_do_not_read_is_refused() -> None:
    form = FORMS[0]
    p = problem(form, 2, torch.float32)
    for message, x, weight, scales, size in (
        ("x is torch.float64", p.x.double(), p.weight, p.scales, IN),
        ("rows must be contiguous", p.x.T.contiguous().T, p.weight, p.scales, IN),
        ("the weight has shape", p.x, p.weight[:, :-4], p.scales, IN),
        ("the scales have shape", p.x, p.weight, p.scales[:, :-4], IN),
        ("a power of two", p.x, p.weight, p.scales, 48),
    ):
        with pytest.raises(ValueError, match=message):
            w8a8_linear_on_cuda(x, weight, scales, None, None, None, False, size, ROW, False)
