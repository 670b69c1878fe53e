"""The decoder of Ministral 3 (Mistral AI 2025): Mistral whose queries grow with their position"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, read_integer
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import listed_windows
from ostinato.models.config_json.rope_fields import take_query_growth
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("Ministral3ForCausalLM",)

_POSITIONS = 262_144
_KEYS = DecoderKeys(windows=listed_windows, default_norm_eps=1e-5, default_positions=_POSITIONS)
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3ForCausalLM(LlamaForCausalLM):
    """Llama; the growth of the queries is in `ModelConfig.query_temperature`."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        if not (hf_config.get("rope_parameters") or hf_config.get("rope_scaling")):
            hf_config = {**hf_config, "rope_parameters": _ROPE}
        positions = read_integer(hf_config, "max_position_embeddings", default=_POSITIONS)
        cleaned, temperature = take_query_growth(hf_config, positions)
        config = read_decoder_config(cleaned, generation_config, _KEYS)
        return replace(config, query_temperature=temperature)
