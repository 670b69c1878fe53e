"""Idefics3 and SmolVLM (arXiv:2408.12637, 2504.05299): SigLIP before Llama"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, read_flag
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.nested_fields import read_text_config, text_kind
from ostinato.models.config_json.text_defaults import LLAVA_TEXTS
from ostinato.models.config_json.towers.tiled_tower_fields import read_idefics_vision
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.step_tensors import MediaTensors

__all__ = ("Idefics3ForConditionalGeneration",)

_BASE = LlamaForCausalLM.checkpoint_layout
_NO_TEXT_EPS = 1e-5  # of the norms, if config.json has no text_config


class Idefics3ForConditionalGeneration(LlamaForCausalLM):
    """Llama whose image tokens have the merged states of a vision transformer."""

    step_tensors = MediaTensors
    checkpoint_layout = replace(
        _BASE,
        prefixes=("model.text_model.", "model."),
        unprefixed=("vision_model.", "connector."),
        renamed=(
            *_BASE.renamed,
            ("vision.projection.", "connector.modality_projection.proj."),
            ("vision.blocks.", "vision_model.encoder.layers."),
            ("vision.patch_embed.", "vision_model.embeddings.patch_embedding."),
            ("vision.position_embedding", "vision_model.embeddings.position_embedding.weight"),
            ("vision.last_norm.", "vision_model.post_layernorm."),
            (".norm1.", ".layer_norm1."),
            (".norm2.", ".layer_norm2."),
            (".attn.", ".self_attn."),
            (".self_attn.proj.", ".self_attn.out_proj."),
        ),
        merged=(*_BASE.merged, ("qkv", ("q_proj", "k_proj", "v_proj"))),
        tower=(r"(^|\.)vision_model\.", r"(^|\.)connector\."),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        text_kind(hf_config, ("llama",), "llama")
        stated = hf_config.get("text_config")
        nested = {"rms_norm_eps": _NO_TEXT_EPS} if stated is None else stated
        is_tied = read_flag(hf_config, "tie_word_embeddings", False)
        text = read_text_config(
            {**hf_config, "text_config": nested}, LLAVA_TEXTS["llama"], is_tied=is_tied
        )
        config = super().read_config(text, generation_config)
        return replace(config, vision=read_idefics_vision(hf_config, config.hidden_size))
