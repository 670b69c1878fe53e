"""Routing: the kernel against plain torch, and plain torch against the routers of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ostinato.ops.moe.routing import RouteSpec, Scoring, route, route_reference
from tests.ops.kernel_checks import EACH_LEVEL, LEVELS, ops_of

NUM_EXPERTS = 12
GROUPS = [(1, 1, 1), (3, 2, 2), (4, 3, 1)]
# Few values, so that many logits are equal.
VALUES = st.sampled_from(
    [-2.0, -0.5, 0.0, 0.25, 1.0, 3.0, float("inf"), -float("inf"), float("nan")]
)
SPECS = st.builds(
    lambda top_k, scoring, renormalize, groups: RouteSpec(
        NUM_EXPERTS, top_k, scoring, renormalize, 2.5, *groups
    ),
    st.integers(1, 8),
    st.sampled_from(Scoring),
    st.booleans(),
    st.sampled_from(GROUPS),
)


def arguments(spec: RouteSpec) -> tuple[Any, ...]:
    return spec.top_k, spec.scoring.value, spec.renormalize, spec.scale, *spec[5:]


def table(ids: Tensor, weights: Tensor) -> Tensor:
    """The weight of each expert: [T, experts], 0 for those that were not chosen."""
    return torch.zeros(len(ids), NUM_EXPERTS).scatter(1, ids.long(), weights)


@pytest.mark.parametrize("level", EACH_LEVEL)
@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.lists(VALUES, min_size=NUM_EXPERTS, max_size=NUM_EXPERTS), max_size=4),
    spec=SPECS,
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_kernel_and_plain_torch_choose_alike(
    level: str, rows: list[list[float]], spec: RouteSpec, has_bias: bool, dtype: torch.dtype
) -> None:
    logits = torch.tensor(rows).view(-1, NUM_EXPERTS).to(dtype)
    bias = torch.linspace(-0.1, 0.1, NUM_EXPERTS) if has_bias else None
    kernel = ops_of("core", level, route="route").route
    ids, weights = kernel(logits, bias, *arguments(spec))
    expected_ids, expected = route_reference(logits, bias, *arguments(spec))
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    for row in range(len(logits)):  # the other rows do not matter
        alone = kernel(logits[row : row + 1], bias, *arguments(spec))
        assert torch.equal(alone[0][0], ids[row])
        assert torch.equal(alone[1][0].nan_to_num(-1.0), weights[row].nan_to_num(-1.0))


def test_weights_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    config = SimpleNamespace(
        num_experts_per_tok=4,
        num_local_experts=NUM_EXPERTS,
        num_experts=NUM_EXPERTS,
        hidden_size=16,
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
        n_group=3,
        topk_group=2,
    )
    x, weight, bias = torch.randn(200, 16), torch.randn(NUM_EXPERTS, 16), torch.rand(NUM_EXPERTS)
    cases = [
        (MixtralTopKRouter, RouteSpec(NUM_EXPERTS, 4)),
        (Qwen3MoeTopKRouter, RouteSpec(NUM_EXPERTS, 4, renormalize=False)),
        (
            DeepseekV3TopkRouter,
            RouteSpec(NUM_EXPERTS, 4, Scoring.sigmoid, False, 2.5, 3, 2, 2),
        ),
    ]
    for router_class, spec in cases:
        router = router_class(config)
        router.weight.data = weight
        has_bias = router_class is DeepseekV3TopkRouter
        if has_bias:
            router.e_score_correction_bias.copy_(bias)
        with torch.no_grad():
            logits, expected, chosen = router(x)
        ids, weights = route(logits, spec, bias if has_bias else None)
        torch.testing.assert_close(table(ids, weights), table(chosen, expected))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RouteSpec(NUM_EXPERTS, 13), "top_k"),
        (RouteSpec(NUM_EXPERTS, 0), "top_k"),
        (RouteSpec(NUM_EXPERTS, 5, num_groups=4, top_groups=1), "top_k"),
        (RouteSpec(NUM_EXPERTS, 1, num_groups=5), "groups"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(spec: RouteSpec, message: str) -> None:
    logits = torch.zeros(2, NUM_EXPERTS)
    for kernel in (ops_of("core", LEVELS[0], route="route").route, route_reference):
        with pytest.raises(ValueError, match=message):
            kernel(logits, None, *arguments(spec))
