"""Gemma 3 (arXiv:2503.19786), also with images: mostly windows, and two rotary tables"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.tower_layouts import SIGLIP_NAMES, TOWER, with_projector
from ostinato.models.config.block_spec import BlockSpec, QKNorm, Residual
from ostinato.models.config.hf_fields import (
    HFConfig,
    read_cap,
    read_flag,
    read_integer,
    read_number,
)
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.layer_windows import layer_types_every, listed_windows
from ostinato.models.config_json.nested_fields import read_text_config
from ostinato.models.config_json.rope_fields import read_rope, rope_by_layer_type
from ostinato.models.config_json.text_defaults import GEMMA3_TEXT
from ostinato.models.config_json.towers.gemma3_tower_fields import read_gemma3_vision
from ostinato.models.families.gemma import GemmaForCausalLM, read_gemma_config
from ostinato.models.families.gemma2 import GEMMA2_LAYOUT
from ostinato.models.step_tensors import DEFAULT_ROPE, LOCAL_ROPE, LookaheadTensors

__all__ = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

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
        pattern = read_integer(hf_config, "sliding_window_pattern", default=6)
        stated = {"sliding_window": 4096, **hf_config, **layer_types_every(hf_config, pattern)}
        everywhere, local = rope_by_layer_type(
            hf_config,
            theta=1_000_000.0,
            local_theta=read_number(hf_config, "rope_local_base_freq", 10_000.0, above=0),
        )
        stated = {key: value for key, value in stated.items() if not key.startswith("rope_")}
        config = read_gemma_config({**stated, **everywhere}, generation_config, _BLOCK)
        # The stated context includes the scaling, although the scaling is linear.
        max_positions = read_integer(hf_config, "max_position_embeddings")
        windows = listed_windows(stated, config.num_layers)
        return replace(
            config,
            max_model_len=max_positions,
            sliding_windows=windows,
            local_rope=read_rope(local, config.head_dim, max_positions),
            rope_kinds=tuple(LOCAL_ROPE if window else DEFAULT_ROPE for window in windows),
            attention_scale=read_number(hf_config, "query_pre_attn_scalar", 256, above=0) ** -0.5,
            attention_soft_cap=read_cap(hf_config, "attn_logit_softcapping"),
            logit_soft_cap=read_cap(hf_config, "final_logit_softcapping"),
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """A Gemma 3 with SigLIP. The tokens of an image see each other."""

    step_tensors = LookaheadTensors
    checkpoint_layout = replace(
        with_projector(GEMMA2_LAYOUT),
        aliases=(("vision_tower.", "vision_tower.vision_model."),),
        renamed=(
            *SIGLIP_NAMES,  # before those of the decoder, which has a `final_norm` too
            *GEMMA2_LAYOUT.renamed,
            ("vision.projection.weight", "multi_modal_projector.mm_input_projection_weight"),
            ("vision.embedding_norm.", "multi_modal_projector.mm_soft_emb_norm."),
        ),
        transposed=("vision.projection",),
        ignored=(*GEMMA2_LAYOUT.ignored, TOWER + r"head\."),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        is_tied = read_flag(hf_config, "tie_word_embeddings", True)
        text = read_text_config(hf_config, GEMMA3_TEXT, is_tied=is_tied)
        config = super().read_config(text, generation_config)
        return replace(config, vision=read_gemma3_vision(hf_config, config.hidden_size))
