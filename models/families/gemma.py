"""Gemma (arXiv:2403.08295): Llama with scaled embeddings; norms are stored as scale minus 1."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.block_spec import BlockSpec, NormKind
from ostinato.models.config.hf_fields import HFConfig, read_flag, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("GemmaForCausalLM", "read_gemma_config")

_KEYS = DecoderKeys(activation="hidden_activation", is_tied=True)
_MUST_BE = {"use_bidirectional_attention": False}


def read_gemma_config(
    hf_config: HFConfig, generation_config: HFConfig | None, block: BlockSpec
) -> ModelConfig:
    """The configuration of a Gemma. The norms and biases of `block` are filled in.

    Raises:
        ValueError: as `read_decoder_config`; or the model's attention is bidirectional.
    """
    is_two_sided = read_flag(hf_config, "use_bidirectional_attention", False)
    refuse_other_values({"use_bidirectional_attention": is_two_sided}, _MUST_BE)
    activation = hf_config.get("hidden_activation")
    if activation is None:
        # Early configs have `gelu` here, although the model uses its approximation by tanh.
        activation = hf_config.get("hidden_act") or "gelu"
        activation = "gelu_pytorch_tanh" if activation == "gelu" else activation
    stated = {**hf_config, "hidden_activation": activation}
    config = read_decoder_config(stated, generation_config, _KEYS)
    has_bias = config.block.qkv_bias
    return replace(
        config,
        block=replace(block, norm=NormKind.rms_plus_one, qkv_bias=has_bias, out_bias=has_bias),
        embedding_scale=config.hidden_size**0.5,
        rounds_embedding_scale=True,
    )


class GemmaForCausalLM(LlamaForCausalLM):
    """Llama with scaled embeddings, other norms, and GELU (approximated by tanh) as gate."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        return read_gemma_config(hf_config, generation_config, BlockSpec())
