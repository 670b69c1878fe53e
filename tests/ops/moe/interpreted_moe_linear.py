"""The Triton kernels of `moe_linear` and `route` under Triton's interpreter, against plain torch.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.ops.moe.moe_linear import _moe_linear_reference, tile_tokens
from ostinato.ops.moe.routing import Scoring, route_reference
from ostinato.ops.moe.triton_moe_linear import grouped_constants, moe_linear_on_cuda
from ostinato.ops.moe.triton_routing import expert_order, launch_route
from tests.ops.moe.test_moe_linear import NUM_EXPERTS, OUT, problem


def check(got: Tensor, expected: Tensor) -> None:
    tolerance = 1e-4 if got.dtype == torch.float32 else 0.2  # sums of 140 products
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=1e-2)
    assert got.dtype == expected.dtype


# The interpreter multiplies no bfloat16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "slots"), [(1, 1), (1, 3), (7, 2), pytest.param(40, 3, marks=pytest.mark.slow)]
)
def test_both_forms(tokens: int, slots: int, dtype: torch.dtype) -> None:
    p = problem(tokens, slots, dtype, tokens)
    each = (p.x, p.ids, p.weight, p.bias, None, None)
    check(moe_linear_on_cuda(*each), _moe_linear_reference(*each))
    summed = (p.x, p.ids, p.weight, None, p.weights, p.residual)
    check(moe_linear_on_cuda(*summed), _moe_linear_reference(*summed))
    rows = (p.x.repeat_interleave(slots, 0), p.ids, p.weight, p.bias, p.weights, None)
    check(moe_linear_on_cuda(*rows), _moe_linear_reference(*rows))


def test_all_tokens_of_one_expert_and_none() -> None:
    p = problem(40, 2, torch.float32, 1)
    p.ids[:, 0], p.ids[:, 1] = NUM_EXPERTS - 1, 1
    arguments = (p.x, p.ids, p.weight, p.bias, None, None)
    check(moe_linear_on_cuda(*arguments), _moe_linear_reference(*arguments))
    empty = (p.x[:0], p.ids[:0], p.weight, p.bias, p.weights[:0], None)
    assert moe_linear_on_cuda(*empty).shape == (0, OUT)


def test_a_token_whose_routing_is_not_a_number_spoils_no_other() -> None:
    p = problem(9, 2, torch.float32, 3)
    p.weights[4] = torch.nan
    result = moe_linear_on_cuda(p.x, p.ids, p.weight, p.bias, p.weights, p.residual)
    assert result.isnan().any(1).nonzero().flatten().tolist() == [4]


def test_the_tile_grows_with_the_rows_of_an_expert() -> None:
    rows = [grouped_constants(n, 128, torch.bfloat16)["BLOCK_M"] for n in (8, 2048, 16384, 65536)]
    assert rows == [16, 16, 64, 128]
    pairs = [8 * tokens for tokens in tile_tokens(128, 8)]
    tiles = [
        [grouped_constants(n + more, 128, torch.bfloat16)["BLOCK_M"] for more in (-8, 0)]
        for n in pairs[1:]
    ]
    assert tiles == [[16, 64], [64, 128]], "each of these steps must be the first with its tile"


@pytest.mark.parametrize("scoring", list(Scoring))
@pytest.mark.parametrize(
    ("experts", "top_k", "has_bias"),
    [(5, 2, False), pytest.param(128, 8, True, marks=pytest.mark.slow), (1, 1, False)],
)
def test_routing(scoring: Scoring, experts: int, top_k: int, has_bias: bool) -> None:
    """Some tokens have equal logits, infinite logits or NaN."""
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(9, experts + 3, generator=generator)[:, :experts].to(torch.float16)
    logits[1] = 0.5
    logits[2, : experts // 2] = -torch.inf
    logits[3, 0], logits[4], logits[5, -1] = torch.nan, -torch.inf, torch.inf
    bias = torch.randn(experts, generator=generator) if has_bias else None
    for renormalize in (False, True):
        options = (top_k, scoring.value, renormalize, 2.5)
        ids, weights = launch_route(logits, bias, *options)
        expected_ids, expected = route_reference(logits, bias, *options, 1, 1, 1)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("tokens", "slots", "experts"), [(1, 1, 1), (3, 2, 5), (50, 4, 128)])
def test_pairs_by_expert(tokens: int, slots: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(experts, (tokens, slots), generator=generator, dtype=torch.int32)
    order, ends = expert_order(ids, experts)
    assert torch.equal(order, ids.flatten().sort(stable=True).indices)
    assert torch.equal(ends, ids.flatten().bincount(minlength=experts).cumsum(0))
