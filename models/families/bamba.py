"""Bamba (IBM, Princeton, CMU and UIUC 2024): Llama with Mamba-2 in most layers."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig, read_layers, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.state_space_fields import read_state_space
from ostinato.models.decoder import Decoder

__all__ = ("MAMBA_NAMES", "BambaForCausalLM", "mamba_names")


def mamba_names(ours: str, stored: str) -> tuple[tuple[str, str], ...]:
    """(our name, the name in checkpoints) of the parts of a Mamba-2 mixer.

    Args:
        ours: the name of the mixer in a block.
        stored: its name in checkpoints. It must not contain `ours`.
    """
    return (
        (f"{ours}.a_log", f"{stored}.A_log"),
        (f"{ours}.conv_bias", f"{stored}.conv1d.bias"),
        (f"{ours}.conv", f"{stored}.conv1d.weight"),
        (f"{ours}.norm", f"{stored}.norm.weight"),
        (f"{ours}.skip", f"{stored}.D"),
        (f"{ours}.", f"{stored}."),
    )


MAMBA_NAMES = mamba_names("mixer", "mamba")
"""The names in the checkpoints of Bamba and Granite 4."""

_KEYS = DecoderKeys(rotary_fraction=0.5, default_norm_eps=1e-5, default_positions=262_144)


class BambaForCausalLM(Decoder):
    """A decoder whose layers have attention if they are listed, and Mamba-2 otherwise."""

    checkpoint_layout = CheckpointLayout(
        renamed=(
            *MAMBA_NAMES,
            ("attention_norm.", "input_layernorm."),
            ("mlp_norm.", "pre_ff_layernorm."),
            ("mlp.", "feed_forward."),
            ("final_norm.", "final_layernorm."),
        ),
        merged=(
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ),
        ignored=(r"rotary_emb\.inv_freq$",),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        if config.rope is not None:
            # The first checkpoints state the number of rotated elements. transformers ignores it.
            refuse_other_values(hf_config, {"attn_rotary_emb": config.rope.rotary_dim})
        listed = read_layers(hf_config, "attn_layer_indices", config.num_layers)
        if not listed:
            raise ValueError(
                "config.json: attn_layer_indices must name at least one layer; a model without "
                "attention has no KV cache and is not supported"
            )
        layers = tuple(layer not in listed for layer in range(config.num_layers))
        return replace(config, recurrent=read_state_space(hf_config, layers, config.norm_eps))
