"""Gemma 2 (arXiv:2408.00118): sandwich norms, soft caps, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.block_spec import BlockSpec, Residual
from ostinato.models.config.hf_fields import HFConfig, read_cap, read_number
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.layer_windows import layer_types_every, listed_windows
from ostinato.models.families.gemma import GemmaForCausalLM, read_gemma_config
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("GEMMA2_LAYOUT", "Gemma2ForCausalLM")

GEMMA2_LAYOUT = replace(
    LlamaForCausalLM.checkpoint_layout,
    renamed=(
        ("attention_norm.", "input_layernorm."),
        ("attention_out_norm.", "post_attention_layernorm."),
        ("mlp_norm.", "pre_feedforward_layernorm."),
        ("mlp_out_norm.", "post_feedforward_layernorm."),
        ("final_norm.", "norm."),
    ),
)
"""The names of the norms in Gemma 2 and 3."""


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma with norms before and after attention and MLP; scores and logits are capped."""

    checkpoint_layout: CheckpointLayout = GEMMA2_LAYOUT

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        stated = {"sliding_window": 4096, **hf_config, **layer_types_every(hf_config, 2)}
        block = BlockSpec(residual=Residual.sandwich)
        config = read_gemma_config(stated, generation_config, block)
        return replace(
            config,
            sliding_windows=listed_windows(stated, config.num_layers),
            attention_scale=read_number(hf_config, "query_pre_attn_scalar", 256, above=0) ** -0.5,
            attention_soft_cap=read_cap(hf_config, "attn_logit_softcapping", 50.0),
            logit_soft_cap=read_cap(hf_config, "final_logit_softcapping", 30.0),
        )
