"""Qwen2 and Qwen2.5 (arXiv:2407.10671, 2412.15115): Llama with biased query, key and value."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.block_spec import BlockSpec
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import switched_windows
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("Qwen2ForCausalLM",)

_KEYS = DecoderKeys(windows=switched_windows)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biased query, key and value projections; its configs do not state the biases."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        return replace(config, block=BlockSpec(qkv_bias=True))
