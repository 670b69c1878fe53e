"""Reads which layers of a decoder are recurrent, and what they have in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ostinato.models.config.block_spec import BlockSpec, QKNorm
from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.config.recurrent_spec import ShortConvSpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.hf_fields import (
    read_first,
    read_integer,
    refuse_other_kinds,
    refuse_other_values,
)

__all__ = ("read_lfm2_config", "recurrent_layers")

_ATTENTION, _CONVOLUTION = "full_attention", "conv"
_LFM2_KEYS = DecoderKeys(norm_eps="norm_eps", default_norm_eps=1e-5, rope_theta=1_000_000.0)


def recurrent_layers(kinds: Sequence[str], recurrent: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is recurrent.

    Args:
        kinds: `layer_types` of the config.
        recurrent: the kind of recurrent layers; that of the others is `full_attention`.
        num_layers: layers of the model.

    Raises:
        ValueError: a layer has no kind or an unknown one, or all layers are recurrent.
    """
    refuse_other_kinds("layer_types", kinds, (_ATTENTION, recurrent), num_layers)
    if _ATTENTION not in kinds:
        raise ValueError(
            f"config.json: layer_types must have {_ATTENTION} for at least one layer; a model "
            "without attention has no KV cache and is not supported"
        )
    return tuple(kind == recurrent for kind in kinds)


def read_lfm2_config(
    hf_config: HFConfig,
    generation_config: HFConfig | None,
    *,
    has_experts: bool = False,
) -> ModelConfig:
    """The configuration of an LFM2 (arXiv:2511.23404), but not its experts.

    Args:
        hf_config: the parsed config.json.
        generation_config: the parsed generation_config.json.
        has_experts: whether the model has experts. Then the MLPs of the other layers have the
            stated intermediate size, and the config must state the kind of each layer.

    Raises:
        ValueError: as `read_decoder_config`; or the kind of a layer is missing or not supported.
    """
    # Older files have other names for these keys. transformers prefers those.
    stated = {
        **hf_config,
        "tie_word_embeddings": read_first(
            hf_config, "tie_embedding", "tie_word_embeddings", default=True
        ),
        "intermediate_size": read_first(hf_config, "block_ff_dim", "intermediate_size"),
        "hidden_act": "silu",
    }
    config = read_decoder_config(stated, generation_config, _LFM2_KEYS)
    # Older files state these keys too. The models of transformers do not read them.
    size, heads = config.hidden_size, config.num_heads
    must_be = {"block_dim": size, "conv_dim": size, "conv_dim_out": size, "num_heads": heads}
    must_be |= {"block_norm_eps": config.norm_eps, "block_use_swiglu": True, "use_pos_enc": True}
    refuse_other_values(hf_config, must_be)
    kinds = hf_config.get("layer_types")
    if kinds is None:
        kinds = () if has_experts else _kinds_by_index(hf_config, config.num_layers)
    recurrent = ShortConvSpec(
        layers=recurrent_layers(kinds, _CONVOLUTION, config.num_layers),
        channels=size,
        conv_width=read_integer(hf_config, "conv_L_cache", default=3),
        has_bias=bool(hf_config.get("conv_bias", False)),
    )
    inner = config.intermediate_size
    return replace(
        config,
        intermediate_size=inner if has_experts else _adjusted_size(hf_config, inner),
        block=BlockSpec(qk_norm=QKNorm.head),
        recurrent=recurrent if any(recurrent.layers) else None,
    )


def _kinds_by_index(hf_config: HFConfig, num_layers: int) -> Sequence[str]:
    """`layer_types` of a config that may list the layers with attention. If not, all have it."""
    attending = hf_config.get("full_attn_idxs")
    attending = range(num_layers) if attending is None else attending
    return [_ATTENTION if layer in attending else _CONVOLUTION for layer in range(num_layers)]


def _adjusted_size(hf_config: HFConfig, size: int) -> int:
    """The intermediate size of an MLP: two thirds of the stated one times a factor, rounded up."""
    if not hf_config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor = hf_config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = read_integer(hf_config, "block_multiple_of", default=256)
    return multiple * -(-int(factor * size) // multiple)
