"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all heads of q and k."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.block_spec import QKNorm, Residual
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("Olmo2ForCausalLM",)

_KEYS = DecoderKeys(default_norm_eps=1e-5)


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Llama with norms of the values that attention and MLP add to the residual stream."""

    checkpoint_layout = replace(
        LlamaForCausalLM.checkpoint_layout,
        renamed=(
            ("attention_out_norm.", "post_attention_layernorm."),
            ("mlp_out_norm.", "post_feedforward_layernorm."),
            ("final_norm.", "norm."),
        ),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        block = replace(config.block, residual=Residual.post_norm, qk_norm=QKNorm.full)
        return replace(config, block=block)
