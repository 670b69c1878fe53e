"""Mixture-of-experts kernels on a device: routing, order, products (against torch), a replay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.ops.moe.moe_linear import moe_linear
from ostinato.ops.moe.routing import RouteSpec, Scoring, route, route_reference
from ostinato.ops.moe.triton_routing import expert_order

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NUM_EXPERTS, TOP_K = 128, 8


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


def products(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """[T, k, N] in float64; x is [T, K] or [T, k, K]."""
    rows = x.unsqueeze(1).expand(-1, ids.shape[1], -1) if x.dim() == 2 else x
    out = torch.empty(*ids.shape, weight.shape[1], dtype=torch.float64, device=CUDA)
    for expert in range(len(weight)):
        chosen = ids == expert
        out[chosen] = rows[chosen].double() @ weight[expert].double().T
    return out


@pytest.mark.parametrize("scoring", list(Scoring))
@pytest.mark.parametrize("tokens", [1, 300])
def test_routing(tokens: int, scoring: Scoring) -> None:
    logits = random(tokens, NUM_EXPERTS, seed=1, dtype=torch.float32)
    if tokens > 1:
        logits[1] = 0.5
        logits[2, 7] = torch.nan
    ids, weights = route(logits, RouteSpec(NUM_EXPERTS, TOP_K, scoring))
    expected_ids, expected = route_reference(
        logits.cpu(), None, TOP_K, scoring.value, True, 1.0, 1, 1, 1
    )
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 64, 1024, 1025])
def test_pairs_by_expert(tokens: int) -> None:
    """1025 tokens have more (token, expert) pairs than the kernel takes (8192), so torch sorts."""
    ids = random(tokens, NUM_EXPERTS, seed=2).argsort(1)[:, :TOP_K].to(torch.int32)
    order, ends = expert_order(ids, NUM_EXPERTS)
    assert torch.equal(order, ids.flatten().sort(stable=True).indices)
    assert torch.equal(ends, ids.flatten().bincount(minlength=NUM_EXPERTS).cumsum(0))


@pytest.mark.parametrize("tokens", [1, 8, 300, 3000])
def test_products_of_experts(tokens: int) -> None:
    """Gate and up, then down with the sum over a token's experts; tiles of 16, 64 and 128 rows."""
    ids = random(tokens, NUM_EXPERTS, seed=3).argsort(1)[:, :TOP_K].to(torch.int32)
    x, weight = random(tokens, 512, seed=4), random(NUM_EXPERTS, 384, 512, seed=5) * 512**-0.5
    expected = products(x, ids, weight)
    inner = moe_linear(x, ids, weight, None)
    torch.testing.assert_close(inner.double(), expected.flatten(0, 1), atol=2.0**-6, rtol=2.0**-7)
    down, residual = random(NUM_EXPERTS, 512, 384, seed=6) * 384**-0.5, random(tokens, 512, seed=7)
    weights = random(tokens, TOP_K, seed=8, dtype=torch.float32).softmax(-1)
    result = moe_linear(inner, ids, down, None, routing_weights=weights, residual=residual)
    slots = products(inner.view(tokens, TOP_K, 384), ids, down)
    summed = (slots * weights.double().unsqueeze(-1)).sum(1) + residual.double()
    torch.testing.assert_close(result.double(), summed, atol=2.0**-6, rtol=2.0**-7)


def test_a_captured_layer_follows_the_router() -> None:
    """The grid does not depend on the routing, so a replay serves other experts."""
    logits, x = random(16, NUM_EXPERTS, seed=1), random(16, 256, seed=2)
    weight = random(NUM_EXPERTS, 256, 256, seed=3)
    spec = RouteSpec(NUM_EXPERTS, TOP_K)

    def call() -> Tensor:
        ids, weights = route(logits, spec)
        return moe_linear(x, ids, weight, None, routing_weights=weights)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for seed in (4, 5):
        logits.copy_(random(16, NUM_EXPERTS, seed=seed))
        graph.replay()
        assert torch.equal(result, call())
