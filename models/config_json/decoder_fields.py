"""Reads the config.json of a decoder.

Families have different names and defaults for the same values (`DecoderKeys`). Each family reads
its block-specific keys itself (models/families/).
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.models.config.block_spec import BlockSpec
from ostinato.models.config.hf_fields import (
    HFConfig,
    architecture_of,
    read_count,
    read_flag,
    read_integer,
    read_number,
    read_token_id,
    read_token_ids,
    refuse_other_values,
)
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.layer_windows import WindowRule, no_windows
from ostinato.models.config_json.rope_fields import read_rope, stretched_context
from ostinato.models.config_json.torch_fields import read_activation, stated_dtype

__all__ = (
    "MUST_BE",
    "DecoderKeys",
    "read_decoder_config",
    "read_head_dim",
)

MUST_BE = {"add_cross_attention": False, "is_encoder_decoder": False}
"""Keys that every decoder must have with this value, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderKeys:
    """A family's names for the values that every decoder has; the defaults are Llama's.

    A tuple holds the names of one value; the first one that config.json has is read. Values that
    config.json does not state are those of the family's config class in transformers.
    """

    hidden_size: tuple[str, ...] = ("hidden_size",)
    intermediate_size: tuple[str, ...] = ("intermediate_size",)
    # intermediate size / hidden size, if the config does not state the intermediate size
    mlp_ratio: int | None = None
    num_layers: tuple[str, ...] = ("num_hidden_layers",)
    num_heads: tuple[str, ...] = ("num_attention_heads",)
    num_kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    max_positions: tuple[str, ...] = ("max_position_embeddings",)
    default_positions: int | None = None  # None = the config must state them
    norm_eps: str = "rms_norm_eps"
    default_norm_eps: float = 1e-6
    activation: str = "hidden_act"
    default_activation: str = "silu"
    is_tied: bool = False  # the default of tie_word_embeddings
    has_rope: bool = True
    rope_theta: float = 10_000.0  # the default of rope_theta
    rotary_fraction: float = 1.0  # rotated share of a head; the default of partial_rotary_factor
    windows: WindowRule = no_windows  # the layers with a sliding window


_LLAMA_KEYS = DecoderKeys()


def read_decoder_config(
    hf_config: HFConfig,
    generation_config: HFConfig | None = None,
    keys: DecoderKeys = _LLAMA_KEYS,
) -> ModelConfig:
    """Read the config.json of a decoder; see `LanguageModel.read_config`.

    Args:
        hf_config: the parsed config.json.
        generation_config: the parsed generation_config.json.
        keys: the names and defaults of the family.

    Raises:
        ValueError: a key is missing, or has a value that is not supported; the text names it.
    """
    refuse_other_values(hf_config, MUST_BE)
    hidden_size = read_integer(hf_config, *keys.hidden_size)
    num_layers = read_count(hf_config, *keys.num_layers)
    num_heads = read_integer(hf_config, *keys.num_heads)
    num_kv_heads = read_integer(hf_config, *keys.num_kv_heads, default=num_heads)
    head_dim = read_head_dim(hf_config, hidden_size, num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: {keys.num_heads[0]}={num_heads} is not a multiple of "
            f"{keys.num_kv_heads[0]}={num_kv_heads}"
        )
    max_positions = read_integer(hf_config, *keys.max_positions, default=keys.default_positions)
    rope = None
    if keys.has_rope:
        rope = read_rope(
            hf_config,
            head_dim,
            max_positions,
            default_fraction=keys.rotary_fraction,
            default_theta=keys.rope_theta,
        )
    attention_bias = read_flag(hf_config, "attention_bias", False)
    return ModelConfig(
        architecture=architecture_of(hf_config),
        vocab_size=read_integer(hf_config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_integer(
            hf_config,
            *keys.intermediate_size,
            default=None if keys.mlp_ratio is None else keys.mlp_ratio * hidden_size,
        ),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=stretched_context(rope, max_positions),
        norm_eps=read_number(hf_config, keys.norm_eps, keys.default_norm_eps, at_least=0),
        activation=read_activation(hf_config, keys.activation, keys.default_activation),
        tie_word_embeddings=read_flag(hf_config, "tie_word_embeddings", keys.is_tied),
        rope=rope,
        sliding_windows=keys.windows(hf_config, num_layers),
        dtype=stated_dtype(hf_config),
        eos_token_ids=read_token_ids(generation_config or {}, "eos_token_id")
        or read_token_ids(hf_config, "eos_token_id"),
        bos_token_id=read_token_id(hf_config, "bos_token_id"),
        block=BlockSpec(
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=read_flag(hf_config, "mlp_bias", False),
        ),
    )


def read_head_dim(hf_config: HFConfig, hidden_size: int, num_heads: int) -> int:
    """Elements of a head: as stated, or the hidden size divided by the number of heads.

    Raises:
        ValueError: it is not stated and the division leaves a remainder, or it is not an integer of
            at least 1.
    """
    if hf_config.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"config.json: there is no head_dim, and the hidden size {hidden_size} is not a "
            f"multiple of the {num_heads} attention heads"
        )
    return read_integer(hf_config, "head_dim", default=hidden_size // num_heads)
