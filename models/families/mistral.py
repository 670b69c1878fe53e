"""Mistral 7B (arXiv:2310.06825): Llama whose tokens see a sliding window of the context."""

from __future__ import annotations

from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import listed_windows
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("MistralForCausalLM",)

_KEYS = DecoderKeys(windows=listed_windows)


class MistralForCausalLM(LlamaForCausalLM):
    """Llama; the window is in `ModelConfig.sliding_windows`."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        stated = {"sliding_window": 4096, **hf_config}
        return read_decoder_config(stated, generation_config, _KEYS)
