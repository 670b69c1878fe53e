"""Qwen3 (arXiv:2505.09388): Llama with queries and keys normalised per head."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.block_spec import QKNorm
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import switched_windows
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("Qwen3ForCausalLM",)

_KEYS = DecoderKeys(windows=switched_windows)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with normalised queries and keys."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        return replace(config, block=replace(config.block, qk_norm=QKNorm.head))
