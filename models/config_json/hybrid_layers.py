"""Reads which layers of a decoder are recurrent, and what they have in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from ostinato.models.config.block_spec import BlockSpec, NormKind, QKNorm
from ostinato.models.config.hf_fields import (
    HFConfig,
    read_first,
    read_flag,
    read_integer,
    read_layers,
    read_number,
    refuse_other_kinds,
    refuse_other_values,
)
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.recurrent_spec import DeltaSpec, ShortConvSpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config

__all__ = (
    "PartKind",
    "read_conv_width",
    "read_gated_delta_config",
    "read_lfm2_config",
    "read_part_kinds",
    "recurrent_layers",
)


class PartKind(StrEnum):
    """The part of a block that has one part alone, by its name in the newest files."""

    mamba = "linear_attention"
    attention = "full_attention"
    mlp = "mlp"
    moe = "moe"


_ATTENTION, _CONVOLUTION, _DELTA = "full_attention", "conv", "linear_attention"
_PART_LETTERS = {"M": PartKind.mamba, "*": PartKind.attention, "-": PartKind.mlp, "E": PartKind.moe}
_OLDER_PARTS = {"mamba": PartKind.mamba, "attention": PartKind.attention}
_WIDTHS = range(2, 17)  # of the convolutions that the CPU kernels compute
_GATED_DELTA_KEYS = DecoderKeys(rotary_fraction=0.25)
_LFM2_KEYS = DecoderKeys(norm_eps="norm_eps", default_norm_eps=1e-5, rope_theta=1_000_000.0)


def recurrent_layers(kinds: object, recurrent: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is recurrent.

    Args:
        kinds: `layer_types` of the config.
        recurrent: the kind of recurrent layers; that of the others is `full_attention`.
        num_layers: layers of the model.

    Raises:
        ValueError: a layer has no kind or an unknown one, or all layers are recurrent.
    """
    refuse_other_kinds("layer_types", kinds, (_ATTENTION, recurrent), num_layers)
    assert isinstance(kinds, Sequence), "other values are refused"
    if _ATTENTION not in kinds:
        raise ValueError(
            f"config.json: layer_types must have {_ATTENTION} for at least one layer; a model "
            "without attention has no KV cache and is not supported"
        )
    return tuple(kind == recurrent for kind in kinds)


def read_part_kinds(hf_config: HFConfig) -> tuple[PartKind, ...]:
    """The part of each block of Nemotron-H.

    Files of transformers 5 have a list of names. Older files have `hybrid_override_pattern`, a text
    with one letter for each block.

    Raises:
        ValueError: a name or a letter is unknown; the list, the text and `num_hidden_layers` do not
            fit each other; or no block has attention.
    """
    pattern = hf_config.get("hybrid_override_pattern")
    if pattern is not None and not (
        isinstance(pattern, str) and pattern and _PART_LETTERS.keys() >= set(pattern)
    ):
        raise ValueError(
            f"config.json: hybrid_override_pattern={pattern!r} must be a text with one of "
            f"{' '.join(_PART_LETTERS)} for each layer"
        )
    key = "layer_types" if hf_config.get("layers_block_type") is None else "layers_block_type"
    listed = hf_config.get(key)
    if listed is None:
        default = [PartKind.mamba, PartKind.moe, PartKind.attention, PartKind.mlp]
        kinds = default if pattern is None else [_PART_LETTERS[letter] for letter in pattern]
    else:
        known = {**_OLDER_PARTS, **{str(kind): kind for kind in PartKind}}
        refuse_other_kinds(key, listed, known, len(listed) if isinstance(listed, list) else 0)
        kinds = [known[kind] for kind in listed]
        if pattern is not None and kinds != [_PART_LETTERS[letter] for letter in pattern]:
            raise ValueError(
                f"config.json: {key}={listed} and hybrid_override_pattern={pattern!r} differ; "
                "remove one of them"
            )
    if hf_config.get("num_hidden_layers", len(kinds)) != len(kinds):
        raise ValueError(
            f"config.json: num_hidden_layers={hf_config['num_hidden_layers']}, but "
            f"{key if listed is not None else 'hybrid_override_pattern'} has {len(kinds)} layers; "
            "make them equal"
        )
    if PartKind.attention not in kinds:
        raise ValueError(
            f"config.json: {key} must have {PartKind.attention} for at least one layer; a model "
            "without attention has no KV cache and is not supported"
        )
    return tuple(kinds)


def read_conv_width(hf_config: HFConfig, key: str, default: int) -> int:
    """The width of a mixer's convolution, in tokens.

    Raises:
        ValueError: the kernels do not support it.
    """
    width = read_integer(hf_config, key, default=default)
    if width not in _WIDTHS:
        raise ValueError(f"config.json: {key}={width} must be from {_WIDTHS[0]} to {_WIDTHS[-1]}")
    return width


def read_gated_delta_config(hf_config: HFConfig, generation_config: HFConfig | None) -> ModelConfig:
    """The configuration of a model with gated delta nets and gated attention, but not its experts.

    These are Qwen3-Next and Qwen3.5. The norms of their blocks are stored as scale minus 1.

    Args:
        hf_config: the parsed config.json.
        generation_config: the parsed generation_config.json.

    Raises:
        ValueError: as `read_decoder_config`; or the kind of a layer is missing or not supported, or
            the numbers of heads do not fit each other.
    """
    # The convolution of queries, keys and values ends with this function too. The models of
    # transformers do not read the other two keys.
    must_be = {"hidden_act": "silu", "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    refuse_other_values(hf_config, must_be)
    config = read_decoder_config(hf_config, generation_config, _GATED_DELTA_KEYS)
    kinds = hf_config.get("layer_types")
    if kinds is None:
        interval = read_integer(hf_config, "full_attention_interval", default=4)
        kinds = [
            _DELTA if (layer + 1) % interval else _ATTENTION for layer in range(config.num_layers)
        ]
    recurrent = DeltaSpec(
        layers=recurrent_layers(kinds, _DELTA, config.num_layers),
        num_k_heads=read_integer(hf_config, "linear_num_key_heads", default=16),
        num_v_heads=read_integer(hf_config, "linear_num_value_heads", default=32),
        k_dim=read_integer(hf_config, "linear_key_head_dim", default=128),
        v_dim=read_integer(hf_config, "linear_value_head_dim", default=128),
        conv_width=read_conv_width(hf_config, "linear_conv_kernel_dim", 4),
    )
    if recurrent.num_v_heads % recurrent.num_k_heads:
        raise ValueError(
            f"config.json: linear_num_value_heads={recurrent.num_v_heads} is not a multiple of "
            f"linear_num_key_heads={recurrent.num_k_heads}"
        )
    block = BlockSpec(
        norm=NormKind.rms_plus_one,
        qk_norm=QKNorm.head,
        qkv_bias=config.block.qkv_bias,
        out_bias=config.block.out_bias,
        has_output_gate=True,
    )
    return replace(config, block=block, recurrent=recurrent if any(recurrent.layers) else None)


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
        conv_width=read_conv_width(hf_config, "conv_L_cache", 3),
        has_bias=read_flag(hf_config, "conv_bias", False),
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
    attending = read_layers(hf_config, "full_attn_idxs", num_layers)
    attending = range(num_layers) if attending is None else attending
    return [_ATTENTION if layer in attending else _CONVOLUTION for layer in range(num_layers)]


def _adjusted_size(hf_config: HFConfig, size: int) -> int:
    """The intermediate size of an MLP: two thirds of the stated one times a factor, rounded up."""
    if not read_flag(hf_config, "block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if hf_config.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    factor = read_number(hf_config, "block_ffn_dim_multiplier", 1.0, above=0)
    multiple = read_integer(hf_config, "block_multiple_of", default=256)
    return multiple * -(-int(factor * size) // multiple)
