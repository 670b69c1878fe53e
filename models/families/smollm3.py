"""SmolLM3: Llama with no rotary embedding in every fourth layer (arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.decoder_config import DecoderKeys, read_decoder_config
from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.step_tensors import DEFAULT_ROPE

__all__ = ("SmolLM3ForCausalLM",)

_KEYS = DecoderKeys(is_tied=True)


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama. `no_rope_layers` has a 0 for each layer without rotary embedding."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(
            {"use_sliding_window": False, **hf_config}, generation_config, _KEYS
        )
        interval = int(hf_config.get("no_rope_layer_interval", 4))
        rotates = hf_config.get("no_rope_layers") or [
            (layer + 1) % interval for layer in range(config.num_layers)
        ]
        if len(rotates) != config.num_layers:
            raise ValueError(
                f"config.json: no_rope_layers has {len(rotates)} entries for "
                f"{config.num_layers} layers"
            )
        return replace(config, rope_kinds=tuple(DEFAULT_ROPE if one else None for one in rotates))
