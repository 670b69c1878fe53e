"""Reads the config.json of models with multi-head latent attention."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, read_flag, read_integer, refuse_other_values
from ostinato.models.config.latent_spec import LatentSpec
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.rope_fields import temperature_of

__all__ = ("read_latent_config",)

_MUST_BE = {"attention_bias": False, "moe_layer_freq": 1}


def read_latent_config(
    hf_config: HFConfig,
    generation_config: HFConfig | None = None,
    keys: DecoderKeys | None = None,
) -> ModelConfig:
    """Read the config.json of a decoder with latent attention, without its experts.

    Args:
        hf_config: the parsed config.json.
        generation_config: the parsed generation_config.json.
        keys: the names and defaults of the family; None = those of Llama.

    Raises:
        ValueError: a key is missing, or has a value that is not supported; the text names it.
    """
    refuse_other_values(hf_config, _MUST_BE)
    rope_dim = read_integer(hf_config, "qk_rope_head_dim")
    # The rotary embedding is read as for heads that have only the rotated elements.
    config = read_decoder_config(
        {**hf_config, "head_dim": rope_dim}, generation_config, keys or DecoderKeys()
    )
    if config.num_kv_heads != config.num_heads:
        raise ValueError(
            f"config.json: num_key_value_heads={config.num_kv_heads} must be "
            f"num_attention_heads={config.num_heads}: every head has keys and values of its own"
        )
    if config.rope is not None and config.rope.rotary_dim != rope_dim:
        raise ValueError(
            f"config.json: partial_rotary_factor must be 1, so that all qk_rope_head_dim={rope_dim}"
            f" elements are rotated; got {config.rope.rotary_dim} rotated elements"
        )
    head_dim = read_integer(hf_config, "qk_nope_head_dim") + rope_dim
    rank = hf_config.get("q_lora_rank")
    return replace(
        config,
        head_dim=head_dim,
        value_dim=read_integer(hf_config, "v_head_dim"),
        attention_scale=head_dim**-0.5 * temperature_of(hf_config),
        latent=LatentSpec(
            query_rank=0 if rank is None else read_integer(hf_config, "q_lora_rank"),
            kv_rank=read_integer(hf_config, "kv_lora_rank"),
            rope_dim=rope_dim,
            is_interleaved=read_flag(hf_config, "rope_interleave", True),
        ),
    )
