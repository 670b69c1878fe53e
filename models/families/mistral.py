"""Mistral 7B (arXiv:2310.06825): Llama whose tokens see a sliding window of the context."""

from __future__ import annotations

from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("MistralForCausalLM",)


class MistralForCausalLM(LlamaForCausalLM):
    """Llama; the window is in `ModelConfig.sliding_windows`."""
