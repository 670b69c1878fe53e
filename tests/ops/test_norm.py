"""The norms against transformers' RMS norm, sums in float64 and numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ostinato.ops.native.library import load
from ostinato.ops.norm import (
    layer_norm,
    plain_rms_norm,
    plain_scale_by_squares,
    plain_square_sums,
    rms_norm,
    scale_by_squares,
    square_sums,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 32)])
def test_the_plain_form_equals_transformers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype) * 3
    reference = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(torch.randn(shape[-1], generator=generator))
        result = plain_rms_norm(x, reference.weight, 1e-5)
        assert result.dtype == dtype
        assert torch.equal(result, reference(x))


def test_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0]])  # mean square 12.5
    result = rms_norm(x, torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(result, torch.tensor([[3.0 / 12.5**0.5, 8.0 / 12.5**0.5]]))
    x = torch.tensor([[1.0, 3.0]])  # mean 2, variance 1
    result = layer_norm(x, torch.tensor([2.0, 3.0]), torch.tensor([0.0, 10.0]), 0.0)
    torch.testing.assert_close(result, torch.tensor([[-2.0, 13.0]]))


def test_zeros_stay_finite() -> None:
    assert rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-6).tolist() == [[0.0] * 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("size", [1, 48, 203])
def test_a_residual_and_a_float32_weight_are_rounded_once(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, size: int
) -> None:
    load("core")
    generator = torch.Generator().manual_seed(size)
    x, residual = (torch.randn(2, 5, size, generator=generator) * 3).to(dtype)
    weight = torch.randn(size, generator=generator).to(weight_dtype or dtype)
    for added in (None, residual):
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        exact = exact * weight.double() + (0.0 if added is None else added.double())
        result = rms_norm(x, weight, 1e-5, added)
        assert result.dtype == dtype
        precision = torch.finfo(dtype).eps
        torch.testing.assert_close(result.double(), exact, atol=1e-6, rtol=0.6 * precision + 1e-6)
        plain = plain_rms_norm(x, weight, 1e-5, added)
        torch.testing.assert_close(result, plain, atol=4 * precision, rtol=3 * precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_parts_of_rows_are_scaled_as_whole_rows(
    dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """The parts are queries and keys, which lie in one matrix."""
    load("core")
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(5, 2 * (48 + 37), generator=generator) * 3).to(dtype)
    weights = torch.randn(2 * (48 + 37), generator=generator).to(weight_dtype or dtype)
    ranks = [x[:, :85], x[:, 85:]]
    whole = [torch.cat([part.split([48, 37], 1)[i] for part in ranks], 1) for i in range(2)]
    forms = (square_sums, scale_by_squares), (plain_square_sums, plain_scale_by_squares)
    for sums, scale in forms:
        squares = torch.stack([sums(*part.split([48, 37], 1)) for part in ranks]).sum(0)
        for column, (first, size) in enumerate([(0, 48), (48, 37)]):
            both = torch.cat([weights[first:][:size], weights[85 + first :][:size]])
            expected = rms_norm(whole[column], both, 1e-5)
            found = [
                scale(
                    part[:, first:][:, :size],
                    both[rank * size :][:size],
                    squares,
                    column,
                    2 * size,
                    1e-5,
                )
                for rank, part in enumerate(ranks)
            ]
            precision = torch.finfo(dtype).eps
            torch.testing.assert_close(
                torch.cat(found, 1), expected, atol=4 * precision, rtol=3 * precision
            )
