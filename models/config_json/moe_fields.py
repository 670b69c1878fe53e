"""Reads the experts of a mixture-of-experts model from config.json."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.models.config.hf_fields import (
    HFConfig,
    read_count,
    read_flag,
    read_integer,
    read_layers,
    read_number,
)
from ostinato.models.config.moe_spec import MoESpec
from ostinato.ops.moe.routing import RouteSpec, Scoring

__all__ = (
    "every_layer",
    "interleaved_layers",
    "read_deepseek_experts",
    "read_route",
    "read_scaled_route",
    "sparse_layers",
)

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_route(
    hf_config: HFConfig,
    *,
    scoring: Scoring = Scoring.softmax,
    renormalize: bool = True,
    scale: float = 1.0,
    group_top: int | None = None,
) -> RouteSpec:
    """The router, with the numbers of experts and groups that the config states.

    Args:
        hf_config: the parsed config.json.
        scoring, renormalize, scale: as in `RouteSpec`; families differ in them.
        group_top: as in `RouteSpec`; None = the family has no groups of experts.

    Raises:
        ValueError: a number is missing or does not fit the others; the text names its key.
    """
    key = next((key for key in _NUM_EXPERTS if hf_config.get(key) is not None), _NUM_EXPERTS[0])
    num_experts = read_count(hf_config, key)
    top_k = read_integer(hf_config, "num_experts_per_tok")
    num_groups = top_groups = 1
    if group_top is not None:
        num_groups = read_integer(hf_config, "n_group", default=1)
        top_groups = read_integer(hf_config, "topk_group", default=1)
        if num_experts % num_groups or top_groups > num_groups:
            raise ValueError(
                f"config.json: n_group={num_groups} must divide {key}={num_experts}, and "
                f"topk_group={top_groups} must be at most n_group"
            )
        group_top = min(group_top, num_experts // num_groups)
    if top_k > num_experts // num_groups * top_groups:
        raise ValueError(
            f"config.json: num_experts_per_tok={top_k} must be at most the number of experts that "
            f"can be chosen, {num_experts // num_groups * top_groups} ({key}={num_experts})"
        )
    return RouteSpec(
        num_experts=num_experts,
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        scale=scale,
        num_groups=num_groups,
        top_groups=top_groups,
        group_top=group_top or 1,
    )


def read_scaled_route(
    hf_config: HFConfig,
    *,
    scoring: Scoring = Scoring.sigmoid,
    renormalize: bool | None = None,
    group_top: int | None = None,
) -> RouteSpec:
    """The router of a model whose config has `norm_topk_prob` and `routed_scaling_factor`.

    Args:
        hf_config: the parsed config.json.
        scoring, group_top: as in `read_route`.
        renormalize: as in `RouteSpec`; None = as the config says.

    Raises:
        ValueError: as `read_route`; or one of the two keys has a value that is not supported.
    """
    if renormalize is None:
        renormalize = read_flag(hf_config, "norm_topk_prob", True)
    scale = read_number(hf_config, "routed_scaling_factor", 1.0, above=0)
    return read_route(
        hf_config, scoring=scoring, renormalize=renormalize, scale=scale, group_top=group_top
    )


def every_layer(num_layers: int) -> tuple[bool, ...]:
    """`MoESpec.layers` of a model in which every block has experts."""
    return (True,) * num_layers


def sparse_layers(hf_config: HFConfig, num_layers: int) -> tuple[bool, ...]:
    """`MoESpec.layers` of Qwen: every `decoder_sparse_step`-th block but those of
    `mlp_only_layers`.

    Raises:
        ValueError: a listed block does not exist.
    """
    step = read_integer(hf_config, "decoder_sparse_step", default=1)
    dense = read_layers(hf_config, "mlp_only_layers", num_layers) or ()
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def interleaved_layers(hf_config: HFConfig, num_layers: int) -> tuple[bool, ...]:
    """`MoESpec.layers` of Llama 4: the blocks of `moe_layers`, or else every
    `interleave_moe_layer_step`-th block.

    Raises:
        ValueError: a listed block does not exist.
    """
    step = read_integer(hf_config, "interleave_moe_layer_step", default=1)
    listed: Sequence[int] | None = read_layers(hf_config, "moe_layers", num_layers)
    if listed is None:
        listed = range(step - 1, num_layers, step)
    return tuple(layer in listed for layer in range(num_layers))


def read_deepseek_experts(
    hf_config: HFConfig,
    num_layers: int,
    *,
    scoring: Scoring = Scoring.sigmoid,
    renormalize: bool | None = None,
    group_top: int | None = 2,
) -> MoESpec:
    """The experts of DeepSeek-V3 (arXiv:2412.19437) and of models with the same routing.

    Args:
        hf_config: the parsed config.json.
        num_layers: layers of the model.
        scoring: as in `RouteSpec`. DeepSeek-V2 has softmax. Only with sigmoid do the scores have a
            bias.
        renormalize: as in `RouteSpec`; None = as the config says.
        group_top: as in `read_route`.

    Raises:
        ValueError: a number is missing or does not fit the others; the text names its key.
    """
    size = read_integer(hf_config, "moe_intermediate_size")
    num_dense = read_integer(hf_config, "first_k_dense_replace", default=0, at_least=0)
    return MoESpec(
        route=read_scaled_route(
            hf_config, scoring=scoring, renormalize=renormalize, group_top=group_top
        ),
        intermediate_size=size,
        layers=tuple(layer >= num_dense for layer in range(num_layers)),
        has_score_bias=scoring is Scoring.sigmoid,
        float32_router=True,
        shared_size=size * read_integer(hf_config, "n_shared_experts"),
    )
