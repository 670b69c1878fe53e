"""Qwen3 (arXiv:2505.09388): Llama with queries and keys normalised per head."""

from __future__ import annotations

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.layers import Attention
from ostinato.models.linear_layers import BuildOptions

__all__ = ("Qwen3ForCausalLM",)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with normalised queries and keys."""

    @staticmethod
    def build_attention(
        config: ModelConfig, options: BuildOptions, sliding_window: int
    ) -> Attention:
        return Attention(
            config,
            options,
            sliding_window=sliding_window,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm=True,
        )
