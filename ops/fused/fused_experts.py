"""The op `ostinato::fused_experts`: a block's output projection and its experts, on CUDA.

A decode step spends as much time on launches as on the experts' weights. On CUDA, four kernels
compute what is one op here (triton_expert_kernels.py). The first is the output projection: a kernel
of this project for few rows, and cuBLAS for more. On other devices the op runs as plain torch.
Tests compare the kernels with this.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.activation import ACTIVATIONS, activate
from ostinato.ops.moe.moe_linear import moe_linear
from ostinato.ops.moe.routing import RouteSpec, Scoring, route
from ostinato.ops.norm import plain_rms_norm
from ostinato.ops.register import register_op

__all__ = ("EXPERT_COUNTERS", "MOST_EXPERTS", "fused_experts")

MOST_EXPERTS = 256  # the scores of a tile of tokens lie in the registers of one program

EXPERT_COUNTERS = 512
"""Counters of a call: one for each expert, and one for each 16 rows of a step of up to 4096."""


def fused_experts(
    x: Tensor,
    output_weight: Tensor,
    output_bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    score_bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    spec: RouteSpec,
    *,
    rounds_logits: bool,
    activation: str,
    counters: Tensor,
) -> Tensor:
    """`hidden = x @ W.T + bias + residual`, then `hidden + experts(rms_norm(hidden))`.

    Args:
        x: [T, K] in bfloat16 or float32, last dimension contiguous: what the attention gives.
        output_weight: W [D, K] in x's dtype, contiguous.
        output_bias: [D] in x's dtype, or None.
        residual: [T, D] in x's dtype, last dimension contiguous.
        norm_weight: [D] in x's dtype or float32, the scale of the RMS norm.
        eps: the norm adds it to the mean square.
        router: [experts, D] in x's dtype, contiguous; at most `MOST_EXPERTS` experts.
        score_bias: [experts] float32, as for `route`, or None.
        gate_up: [experts, 2 I, D] in x's dtype, contiguous.
        down: [experts, D, I] in x's dtype, contiguous.
        spec: how tokens are routed, without groups.
        rounds_logits: whether the router's logits are rounded to x's dtype.
        activation: a key of `ACTIVATIONS`, for `activation(gate) * up`.
        counters: [EXPERT_COUNTERS] int32 zeros, which the kernels change.

    Returns:
        [T, D] contiguous, in x's dtype.
    """
    return _op(
        x,
        output_weight,
        output_bias,
        residual,
        norm_weight,
        eps,
        router,
        score_bias,
        gate_up,
        down,
        spec.top_k,
        spec.scoring.value,
        spec.renormalize,
        spec.scale,
        rounds_logits,
        ACTIVATIONS[activation],
        counters,
    )


def _plain(
    x: Tensor,
    output_weight: Tensor,
    output_bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    score_bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    rounds_logits: bool,
    activation: str,
    counters: Tensor,
) -> Tensor:
    hidden = F.linear(x, output_weight, output_bias) + residual
    normal = plain_rms_norm(hidden, norm_weight, eps)
    logits = F.linear(normal, router) if rounds_logits else normal.float() @ router.float().T
    spec = RouteSpec(len(router), top_k, Scoring(scoring), renormalize, scale)
    ids, weights = route(logits, spec, score_bias)
    name = next(name for name, kind in ACTIVATIONS.items() if kind == activation)
    inner = activate(moe_linear(normal, ids, gate_up, None), name, gated=True)
    return moe_linear(inner, ids, down, None, routing_weights=weights, residual=hidden)


def _on_cuda(*arguments: Any) -> Tensor:
    kernels = import_module("ostinato.ops.fused.triton_fused_experts")
    return kernels.launch_experts(*arguments)


def _fake(
    x: Tensor,
    output_weight: Tensor,
    output_bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    score_bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    rounds_logits: bool,
    activation: str,
    counters: Tensor,
) -> Tensor:
    return x.new_empty((x.shape[0], down.shape[1]))


_op = register_op(
    "fused_experts",
    {"CompositeExplicitAutograd": _plain, "CUDA": _on_cuda},
    fake=_fake,
    mutates=("counters",),
)
