"""The quantised linear ops on every instruction set that this processor runs.

The quantiser's bytes are exact, so they are compared bit for bit with plain torch. A result is a
float32 sum over the groups. Its error may be (groups + 4) * 2**-23 of the sum of their magnitudes.
That is at least twice the bound of Higham, "Accuracy and Stability of Numerical Algorithms",
section 3.1. The rounding to bfloat16 adds 2**-8 of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.quantized import (
    quantize_linear_weight,
    quantized_linear,
    quantized_rows,
)
from ostinato.ops.quantized_reference import (
    QuantFormat,
    dequantize_linear_weight,
    quantize_linear_reference,
    quantize_rows,
    quantized_linear_reference,
)
from tests.ops.kernel_checks import (
    EACH_LEVEL,
    LEVELS,
    QUICK_LEVELS,
    assert_within,
    linear_problem,
    name_of,
    ops_of,
)

_DTYPES = [torch.float32, torch.bfloat16]
_FORMATS = [
    QuantFormat(8, 128, True),
    QuantFormat(8, 32, False),
    QuantFormat(4, 32, True),
    QuantFormat(4, 64, False),
]
# odd sizes on both sides of a panel's 32 columns, of 8 values and of a group
_SHAPES = [(1, 1), (33, 7), (96, 64), (65, 1061)]


def _name(value: object) -> str:
    if isinstance(value, QuantFormat):
        return f"int{value.bits}-{value.group_size}-{'sym' if value.symmetric else 'asym'}"
    return name_of(value)


def _kernels(level: str) -> SimpleNamespace:
    names = {"quantize": "quantize_linear", "linear": "quantized_linear", "rows": "quantized_rows"}
    return ops_of("quantized", level, **names)


@pytest.fixture(params=EACH_LEVEL)
def kernels(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The ops at one instruction set."""
    return _kernels(request.param)


def _rounded_activations(x: Tensor, form: QuantFormat) -> Tensor:
    """The rounded x that the kernel multiplies, float64."""
    parts = [quantize_rows(part.float()) for part in x.split(form.group_size, 1)]
    return torch.cat([whole.double() * scale.double() for whole, scale in parts], 1)


def _assert_close(
    result: Tensor, x: Tensor, quantized: Tensor, form: QuantFormat, addends: list[Tensor]
) -> None:
    a = _rounded_activations(x, form)
    w = dequantize_linear_weight(quantized, form, result.shape[1], x.shape[1]).double()
    groups = -(-x.shape[1] // form.group_size)
    exact = a @ w.T
    for each in addends:
        exact = exact + each.double()
    magnitude = torch.zeros_like(exact)
    for part, rows in zip(a.split(form.group_size, 1), w.split(form.group_size, 1), strict=True):
        magnitude = magnitude + (part @ rows.T).abs()
    for each in addends:
        magnitude = magnitude + each.double().abs()
    bound = (groups + 4) * 2.0**-23 * magnitude + 1e-30
    assert_within(result, exact, bound)


@functools.cache
def _reference_bytes(shape: tuple[int, int], dtype: torch.dtype, form: QuantFormat) -> Tensor:
    return quantize_linear_reference(linear_problem(1, *shape, dtype)[1], *form)


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
def test_every_instruction_set_quantises_to_the_same_bytes(
    kernels: SimpleNamespace, form: QuantFormat
) -> None:
    for shape in (*_SHAPES, (32, 8), (64, 256)):
        for dtype in _DTYPES:
            quantized = kernels.quantize(linear_problem(1, *shape, dtype)[1], *form)
            assert quantized.is_contiguous()
            assert quantized.shape == form.packed_shape(*shape)
            assert torch.equal(quantized, _reference_bytes(shape, dtype, form))


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
@pytest.mark.parametrize("dtype", _DTYPES, ids=_name)
def test_every_number_of_rows_gives_the_same_bits_within_the_error_bound(
    kernels: SimpleNamespace, dtype: torch.dtype, form: QuantFormat
) -> None:
    for shape in _SHAPES:
        x, weight, bias = linear_problem(301, *shape, dtype)
        quantized = kernels.quantize(weight, *form)
        whole = kernels.linear(x, quantized, bias, shape[0], False, None, None, *form)
        assert whole.dtype == dtype
        _assert_close(whole, x, quantized, form, [bias])
        for rows in (*range(1, 14), 25, 100, 301):
            # the last rows, so that a row stands at another place of its block each time
            part = kernels.linear(x[-rows:], quantized, bias, shape[0], False, None, None, *form)
            assert torch.equal(part, whole[-rows:])
        plain = kernels.linear(x[:9], quantized, None, shape[0], False, None, None, *form)
        _assert_close(plain, x[:9], quantized, form, [])


@pytest.mark.parametrize("form", [_FORMATS[0], _FORMATS[3]], ids=_name)
def test_a_result_larger_than_a_cache_has_the_bits_of_its_parts(
    kernels: SimpleNamespace, form: QuantFormat
) -> None:
    x, weight, bias = linear_problem(600, 2048, 128, torch.bfloat16)
    arguments = (kernels.quantize(weight, *form), bias, 2048, False, None, None, *form)
    whole = kernels.linear(x, *arguments)
    parts = [kernels.linear(part, *arguments) for part in x.split(60)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
@pytest.mark.parametrize("rows", [1, 150])
def test_the_number_of_threads_does_not_show(
    kernels: SimpleNamespace, set_threads: Callable[[int], None], rows: int, form: QuantFormat
) -> None:
    x, weight, bias = linear_problem(rows, 650, 770, torch.bfloat16)
    results = []
    for threads in (1, 2, 4, 8):
        set_threads(threads)
        quantized = kernels.quantize(weight, *form)
        result = kernels.linear(x, quantized, bias, 650, False, None, None, *form)
        results.append((quantized, result))
    _assert_close(results[0][1], x, *(results[0][0], form), [bias])
    for quantized, result in results[1:]:
        assert torch.equal(quantized, results[0][0])
        assert torch.equal(result, results[0][1])


@pytest.mark.parametrize("levels", [QUICK_LEVELS, pytest.param(LEVELS, marks=pytest.mark.slow)])
def test_instruction_sets_agree_to_the_last_bits(levels: list[str]) -> None:
    x, weight, bias = linear_problem(17, 70, 700, torch.float32)
    form = QuantFormat(4, 32, True)
    results = []
    for kernels in map(_kernels, levels):
        quantized = kernels.quantize(weight, *form)
        results.append(kernels.linear(x, quantized, bias, 70, False, None, None, *form))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", [QuantFormat(4, 256, True), QuantFormat(8, 256, True)], ids=_name)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_products_overflow_no_lane(
    kernels: SimpleNamespace, form: QuantFormat, sign: float
) -> None:
    weight = torch.zeros(form.packed_shape(32, 256), dtype=torch.uint8)
    weight.fill_(0xFF)
    weight[:, :64].view(torch.bfloat16).fill_(1.0)  # the scales of its one group
    for rows in range(1, 13):
        x = torch.full((rows, 256), 127.0 * sign)
        result = kernels.linear(x, weight, None, 32, False, None, None, *form)
        largest = (1 << form.bits) - 1 - form.offset
        assert torch.equal(result, torch.full_like(result, 256 * 127.0 * sign * largest))


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
@pytest.mark.parametrize("dtype", _DTYPES, ids=_name)
def test_bias_and_residual_are_added_before_rounding(
    kernels: SimpleNamespace, dtype: torch.dtype, form: QuantFormat
) -> None:
    x, weight, bias = linear_problem(21, 70, 130, dtype)
    residual = torch.randn(21, 75).to(dtype)[:, :70]
    quantized = kernels.quantize(weight, *form)
    result = kernels.linear(x, quantized, bias, 70, False, residual, None, *form)
    _assert_close(result, x, quantized, form, [bias, residual])
    sums = kernels.linear(x, quantized, bias, 70, True, None, None, *form)
    assert sums.dtype == torch.float32
    _assert_close(sums, x, quantized, form, [bias])
    rounded = kernels.linear(x, quantized, bias, 70, False, None, None, *form)
    assert torch.equal(sums.to(dtype), rounded)


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
@pytest.mark.parametrize("dtype", _DTYPES, ids=_name)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=_name)
def test_rows_are_those_of_the_dequantised_matrix(
    kernels: SimpleNamespace, ids_dtype: torch.dtype, dtype: torch.dtype, form: QuantFormat
) -> None:
    for shape in _SHAPES:
        _, weight, _ = linear_problem(1, *shape, dtype)
        quantized = kernels.quantize(weight, *form)
        ids = torch.arange(150, dtype=ids_dtype).mul(37).remainder(shape[0])[::2]
        rows = kernels.rows(quantized, ids, *shape, dtype == torch.float32, *form)
        assert rows.is_contiguous()
        matrix = dequantize_linear_weight(quantized, form, *shape)
        assert torch.equal(rows, matrix[ids].to(dtype))


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
def test_no_rows(kernels: SimpleNamespace, form: QuantFormat) -> None:
    _, weight, bias = linear_problem(1, 40, 12, torch.float32)
    quantized = kernels.quantize(weight, *form)
    result = kernels.linear(torch.empty(0, 12), quantized, bias, 40, False, None, None, *form)
    assert result.shape == (0, 40)
    no_ids = torch.empty(0, dtype=torch.int64)
    assert kernels.rows(quantized, no_ids, 40, 12, True, *form).shape == (0, 12)
    assert kernels.quantize(weight[:0], *form).shape == (0, quantized.shape[1])


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
def test_infinities_and_nans_stay_in_their_row(kernels: SimpleNamespace, form: QuantFormat) -> None:
    x, weight, _ = linear_problem(15, 33, 71, torch.float32)
    x[0, 6], x[14, 70] = torch.inf, torch.nan
    quantized = kernels.quantize(weight, *form)
    result = kernels.linear(x, quantized, None, 33, False, None, None, *form)
    assert bool(result[0].isnan().all())
    assert bool(result[14].isnan().all())
    _assert_close(result[1:14], x[1:14], quantized, form, [])


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
def test_zeros_and_the_smallest_and_largest_values(
    kernels: SimpleNamespace, form: QuantFormat
) -> None:
    x, weight, _ = linear_problem(5, 40, 300, torch.float32)
    x[0], x[1], x[2] = 0.0, x[1] * 1e-36, x[2] * 1e30
    weight[3], weight[4], weight[5, :200] = 0.0, weight[4] * 1e-30, 0.0
    quantized = kernels.quantize(weight, *form)
    result = kernels.linear(x, quantized, None, 40, False, None, None, *form)
    assert not bool(result[0].any())
    assert not bool(result[:, 3].any())
    assert bool(result.isfinite().all())
    _assert_close(result, x, quantized, form, [])


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
def test_a_value_is_within_half_a_step(form: QuantFormat) -> None:
    _, weight, _ = linear_problem(1, 64, 256, torch.float32)
    restored = dequantize_linear_weight(quantize_linear_weight(weight, form), form, 64, 256)
    groups = weight.view(64, -1, form.group_size)
    errors = (restored - weight).view_as(groups)
    if form.bits == 8:
        span = groups.abs().amax(2) * 2 if form.symmetric else groups.amax(2) - groups.amin(2)
        assert bool((errors.abs().amax(2) <= span / 254 * 0.51).all())
    relative = float(errors.square().mean().sqrt() / weight.square().mean().sqrt())
    assert relative < {8: 0.0085, 4: 0.093}[form.bits]


def test_asymmetric_groups_of_one_sign_keep_their_resolution() -> None:
    weight = 1.0 + torch.rand(32, 64)
    errors = []
    for symmetric in (True, False):
        form = QuantFormat(8, 64, symmetric)
        restored = dequantize_linear_weight(quantize_linear_weight(weight, form), form, 32, 64)
        errors.append(float((restored - weight).abs().mean()))
    assert errors[1] < 0.6 * errors[0]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 33),
    out_features=st.integers(1, 130),
    in_features=st.integers(1, 150),
    group_size=st.sampled_from([8, 24, 32, 56, 128, 256]),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(_DTYPES),
    has_bias=st.booleans(),
)
def test_any_shape_against_the_reference(
    rows: int,
    out_features: int,
    in_features: int,
    group_size: int,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    x, weight, bias = linear_problem(rows, out_features, in_features, dtype)
    form = QuantFormat(bits, group_size, symmetric)
    quantized = quantize_linear_weight(weight, form)
    chosen = bias if has_bias else None
    result = quantized_linear(x, quantized, chosen, out_features, form)
    reference = quantized_linear_reference(
        x, quantized, chosen, out_features, False, None, None, *form
    )
    for each in (result, reference):
        assert each.dtype == dtype
        _assert_close(each, x, quantized, form, [bias] if has_bias else [])


def test_bad_arguments_are_refused() -> None:
    form = QuantFormat(8, 32, True)
    quantized = quantize_linear_weight(torch.zeros(40, 8), form)
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="must be what quantize_linear_weight made of 40 x 90"):
        quantized_linear(torch.zeros(2, 90), quantized, None, 40, form)
    with pytest.raises(ValueError, match="must be what quantize_linear_weight made of 70 x 8"):
        quantized_linear(x, quantized, None, 70, form)
    with pytest.raises(ValueError, match="must be what quantize_linear_weight made of 40 x 8"):
        quantized_linear(x, quantized, None, 40, QuantFormat(4, 32, True))
    with pytest.raises(ValueError, match="x must be float32 or bfloat16"):
        quantized_linear(x.half(), quantized, None, 40, form)
    with pytest.raises(ValueError, match="x must be a matrix with contiguous rows"):
        quantized_linear(torch.zeros(8, 2).T, quantized, None, 40, form)
    with pytest.raises(ValueError, match="bias must be a contiguous vector of out_features"):
        quantized_linear(x, quantized, torch.zeros(39), 40, form)
    with pytest.raises(ValueError, match=r"residual must be \[T, out_features\]"):
        quantized_linear(x, quantized, None, 40, form, residual=torch.zeros(3, 40))
    for wrong in (QuantFormat(5, 32, True), QuantFormat(8, 12, True), QuantFormat(8, 512, True)):
        with pytest.raises(ValueError, match="8 or 4 bits and groups of 8 to 256 values"):
            quantize_linear_weight(torch.zeros(40, 8), wrong)
    with pytest.raises(ValueError, match="must have at least one column, got 0"):
        quantized_linear(torch.zeros(3, 0), quantized, None, 40, form)
    with pytest.raises(ValueError, match="cannot be quantised: the CPU's matrix kernels take"):
        quantize_linear_weight(torch.zeros(4, 4, dtype=torch.float16), form)
    message = r"ids\[1\] is 40, not a row of the weight: 0 to 39"
    with pytest.raises(ValueError, match=message):
        quantized_rows(quantized, torch.tensor([0, 40]), 40, 8, form, dtype=torch.float32)


@pytest.mark.parametrize("form", _FORMATS, ids=_name)
def test_the_registrations_pass_opcheck(form: QuantFormat) -> None:
    x, weight, bias = linear_problem(5, 45, 21, torch.bfloat16)
    quantized = quantize_linear_weight(weight, form)
    assert form.packed_shape(*weight.shape) == quantized.shape
    ops = torch.ops.ostinato
    torch.library.opcheck(ops.quantize_linear.default, (weight, *form))
    residual = torch.zeros(5, 45, dtype=torch.bfloat16)
    torch.library.opcheck(
        ops.quantized_linear.default, (x, quantized, bias, 45, False, residual, None, *form)
    )
    torch.library.opcheck(
        ops.quantized_linear.default, (x, quantized, None, 45, True, None, None, *form)
    )
    ids = torch.tensor([44, 1])
    torch.library.opcheck(ops.quantized_rows.default, (quantized, ids, 45, 21, False, *form))
