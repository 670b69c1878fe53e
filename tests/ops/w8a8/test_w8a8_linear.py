"""`w8a8_linear` and `w8a8_moe_linear` in plain torch, and the call of `torch._scaled_mm`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from ostinato.ops.w8a8.round_rows import InputScales, round_rows
from ostinato.ops.w8a8.w8a8_linear import w8a8_linear, w8a8_moe_linear

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
ROW, GROUP, STATIC = InputScales


def stored(dtype: torch.dtype, size: tuple[int, int], group: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size[0])
    weight = torch.randn(size, generator=generator) * 30
    scales = torch.rand(-(-size[1] // group), size[0], generator=generator) / 100
    return weight.clamp(-127, 127).to(dtype), scales


def test_a_scale_is_the_largest_magnitude_over_the_largest_number() -> None:
    x = torch.tensor([[1.0, -448.0, 3.3], [0.0, 0.0, 0.0], [torch.inf, 1.0, 1.0]])
    values, scales = round_rows(x, E4M3, ROW, 3, None, powers=False)
    assert values[0].tolist() == [1.0, -448.0, 3.25]
    assert scales[0].item() == 1.0
    assert values[1].tolist() == [0.0] * 3
    assert scales[2].isnan().item()
    values, scales = round_rows(x[:1] / 3, INT8, ROW, 3, None, powers=False)
    assert values.tolist() == [[0, -127, 1]]
    values, scales = round_rows(x[:1], E4M3, STATIC, 3, torch.tensor([0.5, 0.25]), powers=False)
    assert values.tolist() == [[2.0, -448.0, 6.5]], "values beyond the range must be clipped"
    assert scales.tolist() == [[0.5]]


def test_scales_that_are_powers_of_two_are_not_smaller() -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    _, exact = round_rows(x, E4M3, GROUP, 64, None, powers=False)
    _, scales = round_rows(x, E4M3, GROUP, 64, None, powers=True)
    assert torch.equal(scales.log2(), exact.log2().ceil())


@pytest.mark.parametrize(
    ("dtype", "group", "inputs"),
    [(E4M3, 96, ROW), (E4M3, 32, GROUP), (INT8, 96, STATIC), (INT8, 32, ROW)],
)
def test_products_are_those_of_the_formula(
    dtype: torch.dtype, group: int, inputs: InputScales
) -> None:
    weight, scales = stored(dtype, (20, 96), group)
    generator = torch.Generator().manual_seed(3)
    x, residual = torch.randn(5, 96, generator=generator), torch.randn(5, 20, generator=generator)
    bias = torch.randn(20, generator=generator)
    given = torch.tensor([0.03]) if inputs is STATIC else None
    most = {E4M3: 448.0, INT8: 127.0}[dtype]
    expected = torch.zeros(5, 20, dtype=torch.float64)
    for row in range(5):
        for begin in range(0, 96, group):
            part = x[row, begin : begin + group]
            scale = (part if inputs is GROUP else x[row]).abs().max() / most
            scale = scale if given is None else given[0]
            whole = (part / scale).clamp(-most, most)
            whole = whole.round() if dtype == INT8 else whole.to(E4M3).float()
            matrix = weight[:, begin : begin + group].double() * scales[begin // group, :, None]
            expected[row] += matrix @ (whole.double() * scale)
    expected += bias.double() + residual.double()
    got = w8a8_linear(x, weight, scales, bias, group, inputs, input_scale=given, residual=residual)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
    half = w8a8_linear(x.half(), weight, scales, None, group, inputs, input_scale=given)
    assert half.dtype == torch.float16


def test_experts_are_products_of_their_own() -> None:
    pairs = [stored(E4M3, (20 + e, 64), 32) for e in range(3)]
    weight = torch.stack([w[:20] for w, _ in pairs])
    scales = torch.stack([s[:, :20] for _, s in pairs])
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 64, generator=generator)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]], dtype=torch.int32)
    bias = torch.randn(3, 20, generator=generator)
    got = w8a8_moe_linear(x, ids, weight, scales, bias, 32, GROUP)
    for index, expert in enumerate(ids.flatten().tolist()):
        row = x[index // 2 : index // 2 + 1]
        alone = w8a8_linear(row, weight[expert], scales[expert], bias[expert], 32, GROUP)
        assert torch.equal(got[index], alone[0])
    routing, residual = torch.rand(4, 2, generator=generator), torch.randn(4, 20)
    whole = w8a8_moe_linear(
        x, ids, weight, scales, bias, 32, GROUP, routing_weights=routing, residual=residual
    )
    expected = (got.view(4, 2, 20) * routing[:, :, None]).sum(1) + residual
    torch.testing.assert_close(whole, expected)
    with pytest.raises(ValueError, match="ids must be experts, 0 to 2"):
        w8a8_moe_linear(x, ids + 1, weight, scales, bias, 32, GROUP)


def test_scaled_mm_is_called_as_torch_wants() -> None:
    """torch multiplies float8 on a CPU too, with the same arguments."""
    kernels = pytest.importorskip("ostinato.ops.w8a8.triton_w8a8_linear")
    weight, scales = stored(E4M3, (48, 64), 64)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(70, 64, generator=generator).bfloat16()
    bias, residual = torch.randn(48).bfloat16(), torch.randn(70, 48).bfloat16()
    rounded, x_scales = round_rows(x, E4M3, ROW, 64, None, powers=False)
    got = kernels.scaled_mm(rounded, x_scales, weight, scales, bias, residual)
    expected = w8a8_linear(x, weight, scales, bias, 64, ROW, residual=residual)
    torch.testing.assert_close(got, expected, atol=0.06, rtol=0.02)


def test_the_ops_have_honest_fakes() -> None:
    weight, scales = stored(INT8, (20, 64), 32)  # opcheck does not support float8
    x, bias = torch.randn(3, 64), torch.randn(20)
    given = (x, weight, scales, None, bias, None, True, 32, "group", False)
    opcheck(torch.ops.ostinato.w8a8_linear.default, given)
    ids = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    stack = weight.expand(2, -1, -1).contiguous(), scales.expand(2, -1, -1).contiguous()
    given = (x, ids, *stack, None, None, torch.rand(3, 2), None, 32, "group", False)
    opcheck(torch.ops.ostinato.w8a8_moe_linear.default, given)
