"""Llama 1, 2 and 3 (arXiv:2302.13971, 2307.09288, 2407.21783), and the base of models like it.

Pre-norm residual blocks: attention with rotary positions, then a gated MLP. Mistral adds a sliding
window, Qwen2 adds biases, and Qwen3 normalises queries and keys.
"""

from __future__ import annotations

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import read_decoder_config
from ostinato.models.decoder import LLAMA_NAMES, Decoder

__all__ = ("LlamaForCausalLM",)


class LlamaForCausalLM(Decoder):
    """A decoder of the default `BlockSpec`, with the biases that the config states."""

    checkpoint_layout = CheckpointLayout(
        renamed=LLAMA_NAMES,
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
        return read_decoder_config(hf_config, generation_config)
