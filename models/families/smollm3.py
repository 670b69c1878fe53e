"""SmolLM3: Llama with no rotary embedding in every fourth layer (arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, read_count
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import layer_types_where, switched_windows
from ostinato.models.config_json.rope_fields import read_rope_kinds
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("SmolLM3ForCausalLM",)

_KEYS = DecoderKeys(is_tied=True, rope_theta=2_000_000.0, windows=switched_windows)


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama. `no_rope_layers` has a 0 for each layer without rotary embedding."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        kinds = read_rope_kinds(hf_config, read_count(hf_config, "num_hidden_layers"))
        windowed = layer_types_where(hf_config, lambda layer: kinds[layer] is None)
        config = read_decoder_config({**hf_config, **windowed}, generation_config, _KEYS)
        return replace(config, rope_kinds=kinds)
