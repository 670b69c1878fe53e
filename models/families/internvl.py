"""InternVL3 and InternVL3.5 (arXiv:2504.10479, 2508.18265): InternViT before Qwen2 or Qwen3"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, read_flag
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.nested_fields import read_text_config, text_kind
from ostinato.models.config_json.text_defaults import LLAVA_TEXTS
from ostinato.models.config_json.towers.tiled_tower_fields import read_intern_vision
from ostinato.models.decoder import Decoder
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.families.qwen2 import Qwen2ForCausalLM
from ostinato.models.families.qwen3 import Qwen3ForCausalLM
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.step_tensors import MediaTensors

__all__ = ("InternVLForConditionalGeneration",)

# All of them have the checkpoint layout of Llama.
_TEXTS: dict[str, type[LlamaForCausalLM]] = {
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "llama": LlamaForCausalLM,
}
_BASE = LlamaForCausalLM.checkpoint_layout
_TOWER = r"(^|\.)vision_tower\."


class InternVLForConditionalGeneration(Decoder):
    """A decoder whose image tokens have the merged states of a vision transformer."""

    step_tensors = MediaTensors
    head_by_checkpoint = True
    checkpoint_layout = replace(
        _BASE,
        prefixes=("language_model.model.", "model.", "language_model.", "model."),
        unprefixed=("vision_tower.", "multi_modal_projector."),
        renamed=(
            *_BASE.renamed,
            ("vision.projector.norm.", "multi_modal_projector.layer_norm."),
            ("vision.projector.", "multi_modal_projector."),
            ("vision.blocks.", "vision_tower.encoder.layer."),
            ("vision.patch_embed.", "vision_tower.embeddings.patch_embeddings.projection."),
            ("vision.class_embedding", "vision_tower.embeddings.cls_token"),
            ("vision.position_embedding", "vision_tower.embeddings.position_embeddings"),
            ("vision.last_norm.", "vision_tower.layernorm."),
            (".norm1.", ".layernorm_before."),
            (".norm2.", ".layernorm_after."),
            (".attention_scale", ".lambda_1"),
            (".mlp_scale", ".lambda_2"),
            (".query_norm.", ".attention.q_norm."),
            (".key_norm.", ".attention.k_norm."),
            (".attn.proj.", ".attention.projection_layer."),
            (".attn.", ".attention."),
        ),
        merged=(*_BASE.merged, ("qkv", ("q_proj", "k_proj", "v_proj"))),
        ignored=(*_BASE.ignored, _TOWER + r"embeddings\.mask_token$"),
        tower=(_TOWER, r"(^|\.)multi_modal_projector\."),
    )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        if config.vision is not None and self.vision is not None:
            later = range(config.vision.num_used_layers, config.vision.num_layers)
            unused = [rf"encoder\.layer\.{layer}\." for layer in later]
            if not config.vision.has_last_norm:
                unused.append(r"layernorm\.")
            layout = self.checkpoint_layout
            self.checkpoint_layout = layout.without(*(_TOWER + each for each in unused))

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        kind = text_kind(hf_config, _TEXTS, "qwen2")
        is_tied = read_flag(hf_config, "tie_word_embeddings", True)
        nested = {**hf_config, "text_config": hf_config.get("text_config") or {}}
        text = read_text_config(nested, LLAVA_TEXTS[kind], is_tied=is_tied)
        config = _TEXTS[kind].read_config(text, generation_config)
        return replace(config, vision=read_intern_vision(hf_config, config.hidden_size))
