"""Reads the config.json of a Llama-like decoder: the keys that most families share.

A family with other keys reads them in its own module (models/families/).
"""

from __future__ import annotations

from ostinato.models.config.hf_fields import (
    architecture_of,
    read_activation,
    read_first,
    read_integer,
    read_token_ids,
    refuse_other_values,
    stated_dtype,
)
from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.config.rope_fields import read_rope, stretched_context

__all__ = ("MUST_BE", "read_decoder_config", "read_head_dim", "read_sliding_windows")

MUST_BE = {"add_cross_attention": False, "is_encoder_decoder": False}
"""Keys of every decoder with the only value that is served."""


def read_decoder_config(
    hf_config: HFConfig, generation_config: HFConfig | None = None
) -> ModelConfig:
    """Read the config.json of a Llama-like decoder; see `LanguageModel.read_config`."""
    refuse_other_values(hf_config, MUST_BE)
    hidden_size = read_integer(hf_config, "hidden_size")
    num_layers = read_integer(hf_config, "num_hidden_layers")
    num_heads = read_integer(hf_config, "num_attention_heads")
    num_kv_heads = read_integer(hf_config, "num_key_value_heads", default=num_heads)
    head_dim = read_head_dim(hf_config, hidden_size, num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    max_positions = read_integer(hf_config, "max_position_embeddings")
    rope = read_rope(hf_config, head_dim, max_positions)
    return ModelConfig(
        architecture=architecture_of(hf_config),
        vocab_size=read_integer(hf_config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_integer(hf_config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=stretched_context(rope, max_positions),
        norm_eps=float(read_first(hf_config, "rms_norm_eps", default=1e-6)),
        activation=read_activation(hf_config, "hidden_act", "silu"),
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        attention_bias=bool(hf_config.get("attention_bias", False)),
        mlp_bias=bool(hf_config.get("mlp_bias", False)),
        rope=rope,
        sliding_windows=read_sliding_windows(hf_config, num_layers),
        dtype=stated_dtype(hf_config),
        eos_token_ids=read_token_ids(generation_config or {}, "eos_token_id")
        or read_token_ids(hf_config, "eos_token_id"),
        bos_token_id=hf_config.get("bos_token_id"),
    )


def read_head_dim(hf_config: HFConfig, hidden_size: int, num_heads: int) -> int:
    """Rows of a head: as stated, or the hidden size divided by the number of heads.

    Raises:
        ValueError: it is not stated and the division leaves a remainder.
    """
    quotient = hidden_size // num_heads if hidden_size % num_heads == 0 else None
    return read_integer(hf_config, "head_dim", default=quotient)


def read_sliding_windows(hf_config: HFConfig, num_layers: int) -> tuple[int, ...]:
    """Tokens that each layer's rows see, themselves included; 0 = all.

    A window holds for every layer (Mistral), from layer `max_window_layers` on (Qwen), or where
    `layer_types` says so.

    Raises:
        ValueError: `layer_types` has another length or an unknown entry.
    """
    # Configs with max_window_layers (Qwen) state a window that is off unless they say otherwise.
    enabled = hf_config.get("use_sliding_window", "max_window_layers" not in hf_config)
    window = int(hf_config.get("sliding_window") or 0) if enabled else 0
    layer_types = hf_config.get("layer_types")
    if layer_types is None:
        first = int(hf_config.get("max_window_layers", 0))
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    by_type = {"full_attention": 0, "sliding_attention": window}
    unknown = set(layer_types) - by_type.keys()
    if unknown:
        raise ValueError(
            f"config.json: layer_types has {sorted(unknown)}; supported are {', '.join(by_type)}"
        )
    if len(layer_types) != num_layers:
        raise ValueError(
            f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers"
        )
    return tuple(by_type[kind] for kind in layer_types)
