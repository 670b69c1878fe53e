"""Gemma 3 without images (arXiv:2503.19786): mostly layers with a window, and two rotary tables."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.block_spec import BlockSpec, QKNorm, Residual
from ostinato.models.config.decoder_config import layer_types_every
from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.config.rope_fields import read_rope, rope_by_layer_type
from ostinato.models.families.gemma import GemmaForCausalLM, read_gemma_config
from ostinato.models.families.gemma2 import GEMMA2_LAYOUT
from ostinato.models.step_tensors import DEFAULT_ROPE, LOCAL_ROPE

__all__ = ("Gemma3ForCausalLM",)

_BLOCK = BlockSpec(residual=Residual.sandwich, qk_norm=QKNorm.head)


class Gemma3ForCausalLM(GemmaForCausalLM):
    """Gemma 2 with normalised heads, usually without caps.

    Layers with a window have a rotary table of their own.
    """

    checkpoint_layout: CheckpointLayout = GEMMA2_LAYOUT

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        pattern = int(hf_config.get("sliding_window_pattern", 6))
        stated = {"sliding_window": 4096, **layer_types_every(hf_config, pattern), **hf_config}
        everywhere, local = rope_by_layer_type(
            hf_config,
            theta=1_000_000.0,
            local_theta=float(hf_config.get("rope_local_base_freq", 10_000.0)),
        )
        stated = {key: value for key, value in stated.items() if not key.startswith("rope_")}
        config = read_gemma_config({**stated, **everywhere}, generation_config, _BLOCK)
        max_positions = config.max_model_len
        return replace(
            config,
            local_rope=read_rope(local, config.head_dim, max_positions),
            rope_kinds=tuple(LOCAL_ROPE if one else DEFAULT_ROPE for one in config.sliding_windows),
            attention_scale=float(hf_config.get("query_pre_attn_scalar", 256)) ** -0.5,
            attention_soft_cap=float(hf_config.get("attn_logit_softcapping") or 0.0),
            logit_soft_cap=float(hf_config.get("final_logit_softcapping") or 0.0),
        )
