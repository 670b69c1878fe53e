"""Routing of tokens to experts: `ostinato::route`.

A router gives each token a logit for each expert. Model families differ in three points: how logits
become scores, which numbers choose the best experts, and how the scores of the chosen experts
become weights (`RouteSpec`). A token's result does not depend on other tokens, no size depends on
data, and the host reads no result.

The kernels are ops/native/moe/route.cpp on a CPU and triton_routing.py on a GPU. The op runs as
plain torch until the C++ kernel is loaded, for routers with groups on a GPU, and on other devices.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.register import register_op

__all__ = ("RouteSpec", "Scoring", "route", "route_on_cuda", "route_reference")

_LEAST_SUM = 1e-20  # keeps the division by a sum of zeros defined


class Scoring(StrEnum):
    """How logits become scores."""

    softmax = "softmax"  # over all experts (arXiv:2006.16668)
    sigmoid = "sigmoid"  # each expert by itself (DeepSeek-V3, arXiv:2412.19437)
    top_softmax = "top_softmax"  # over the chosen experts (arXiv:1701.06538)


class RouteSpec(NamedTuple):
    """How tokens are routed. The default values are those of Mixtral (arXiv:2401.04088)."""

    num_experts: int
    top_k: int  # experts of a token
    scoring: Scoring = Scoring.softmax
    renormalize: bool = True  # the weights of a token are divided by their sum
    scale: float = 1.0  # factor of the weights, applied last
    # Experts are divided into groups of equal size, and only experts of the best groups can be
    # chosen. A group's score is the sum of the scores of its `group_top` best experts.
    num_groups: int = 1
    top_groups: int = 1
    group_top: int = 1


def route(logits: Tensor, spec: RouteSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, and how much each of them counts.

    The `top_k` experts with the greatest scores are chosen, the greatest first. If scores are
    equal, the expert with the lower number wins. A bias is added to the scores only to choose
    groups and experts. The weights come from the scores alone.

    A token with a NaN among its logits, or without a defined softmax, gets the first experts and
    NaN weights. So its own result shows the error, and the results of other tokens are untouched.

    Args:
        logits: [T, num_experts] float32, bfloat16 or float16; computed in float32.
        spec: how tokens are routed.
        bias: [num_experts] float32, or None.

    Returns:
        The experts [T, top_k] int32, and their weights [T, top_k] float32.

    Raises:
        ValueError: a shape or dtype is not as above, or the spec's numbers do not fit each other.
    """
    return _route(
        logits,
        bias,
        spec.top_k,
        spec.scoring.value,
        spec.renormalize,
        spec.scale,
        spec.num_groups,
        spec.top_groups,
        spec.group_top,
    )


def route_reference(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_top: int,
) -> tuple[Tensor, Tensor]:
    """`route` in plain torch."""
    num_experts = logits.shape[1]
    _check(num_experts, top_k, num_groups, top_groups)
    logits = logits.float()
    scores = logits
    if scoring == Scoring.softmax:
        scores = logits.softmax(-1)
    elif scoring == Scoring.sigmoid:
        scores = logits.sigmoid()
    # Logits choose the experts, because they have the same order as the scores. Small scores round
    # to zero and would become equal.
    choice = logits
    if bias is not None or num_groups > 1:
        choice = scores if bias is None else scores + bias
    if num_groups > 1:
        groups = choice.view(-1, num_groups, num_experts // num_groups)
        sums = groups.sort(dim=-1, descending=True, stable=True).values[..., :group_top].sum(-1)
        best = sums.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
        is_open = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True)
        closed = ~is_open.repeat_interleave(num_experts // num_groups, 1)
        choice = choice.masked_fill(closed, -torch.inf)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if scoring == Scoring.top_softmax:
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    weights = weights * scale
    wrong = logits.isnan().any(-1, keepdim=True) | weights.isnan().any(-1, keepdim=True)
    first = torch.arange(top_k, device=logits.device).expand_as(ids)
    ids = torch.where(wrong, first, ids)
    return ids.to(torch.int32), weights.masked_fill(wrong, torch.nan)


def _check(num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    if num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"{num_groups} groups, {top_groups} of them chosen, do not fit {num_experts} experts"
        )
    if not 1 <= top_k <= top_groups * (num_experts // num_groups):
        raise ValueError(
            f"top_k must be 1 to the number of experts of the chosen groups, got {top_k}"
        )


def route_on_cuda(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_top: int,
) -> tuple[Tensor, Tensor]:
    """`route` as a GPU runs it."""
    spec = (top_k, scoring, renormalize, scale)
    if num_groups > 1:
        return route_reference(logits, bias, *spec, num_groups, top_groups, group_top)
    _check(logits.shape[1], top_k, num_groups, top_groups)
    return import_module("ostinato.ops.moe.triton_routing").launch_route(logits, bias, *spec)


def _route_fake(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_top: int,
) -> tuple[Tensor, Tensor]:
    size = (logits.shape[0], top_k)
    return logits.new_empty(size, dtype=torch.int32), logits.new_empty(size, dtype=torch.float32)


_route = register_op(
    "route",
    {"CompositeExplicitAutograd": route_reference, "CUDA": route_on_cuda},
    fake=_route_fake,
)
