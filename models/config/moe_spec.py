"""The experts of a mixture-of-experts model, as data (models/layers/moe.py builds them)."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.ops.moe.routing import RouteSpec

__all__ = ("MoESpec",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """The experts that replace the MLP in some or all blocks."""

    route: RouteSpec
    intermediate_size: int  # the intermediate size of one expert
    layers: tuple[bool, ...]  # for each block, whether it has experts
    has_score_bias: bool = False  # experts are chosen by score + bias (arXiv:2408.15664)
    has_bias: bool = False  # the router and the experts, which are gated, have biases
    float32_router: bool = False  # logits are not rounded to the activations' dtype
    scales_input: bool = False  # the routing weights multiply an expert's input, not its result
    # intermediate size of the shared expert, to which every token goes; 0 = none
    shared_size: int = 0
    shared_gate: bool = False  # the shared expert is weighted by the sigmoid of a logit of its own
