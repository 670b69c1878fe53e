"""Qwen2 and Qwen2.5 (arXiv:2407.10671, 2412.15115): Llama with biased query, key and value."""

from __future__ import annotations

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.layers import Attention
from ostinato.models.linear_layers import BuildOptions

__all__ = ("Qwen2ForCausalLM",)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biased query, key and value projections; their configs do not mention it."""

    @staticmethod
    def build_attention(
        config: ModelConfig, options: BuildOptions, sliding_window: int
    ) -> Attention:
        return Attention(config, options, sliding_window=sliding_window, qkv_bias=True)
