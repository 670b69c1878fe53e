"""LLaVA 1.5 (arXiv:2310.03744): CLIP or SigLIP before Llama, Mistral, Qwen2 or Qwen3"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.config_json.nested_fields import read_text_config, text_kind
from ostinato.models.config_json.text_defaults import LLAVA_TEXTS
from ostinato.models.config_json.towers.llava_tower_fields import read_llava_vision
from ostinato.models.decoder import Decoder
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.families.mistral import MistralForCausalLM
from ostinato.models.families.qwen2 import Qwen2ForCausalLM
from ostinato.models.families.qwen3 import Qwen3ForCausalLM
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.step_tensors import MediaTensors

__all__ = ("LlavaForConditionalGeneration",)


# All of them have the checkpoint layout of Llama.
_TEXTS: dict[str, type[LlamaForCausalLM]] = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
_BASE = LlamaForCausalLM.checkpoint_layout
_TOWER = r"(^|\.)vision_tower\.(vision_model\.)?"
_UNUSED = (r"post_layernorm\.", r"head\.", r"embeddings\.position_ids$")


class LlavaForConditionalGeneration(Decoder):
    """A decoder whose image tokens have the projected states of a vision tower."""

    step_tensors = MediaTensors
    checkpoint_layout = replace(
        _BASE,
        prefixes=("language_model.model.", "model.", "language_model.", "model."),
        unprefixed=("vision_tower.", "multi_modal_projector."),
        aliases=(("vision_tower.", "vision_tower.vision_model."),),
        renamed=(
            *_BASE.renamed,
            ("vision.projector.", "multi_modal_projector."),
            ("vision.blocks.", "vision_tower.encoder.layers."),
            ("vision.patch_embed.", "vision_tower.embeddings.patch_embedding."),
            ("vision.class_embedding", "vision_tower.embeddings.class_embedding"),
            ("vision.position_embedding", "vision_tower.embeddings.position_embedding.weight"),
            ("vision.pre_norm.", "vision_tower.pre_layrnorm."),
            (".norm1.", ".layer_norm1."),
            (".norm2.", ".layer_norm2."),
            (".attn.", ".self_attn."),
            (".self_attn.proj.", ".self_attn.out_proj."),
        ),
        merged=(*_BASE.merged, ("qkv", ("q_proj", "k_proj", "v_proj"))),
        tower=(_TOWER, r"(^|\.)multi_modal_projector\."),
    )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        if config.vision is not None and self.vision is not None:
            later = range(config.vision.num_used_layers, config.vision.num_layers)
            unused = (*_UNUSED, *(rf"encoder\.layers\.{layer}\." for layer in later))
            layout = self.checkpoint_layout
            self.checkpoint_layout = layout.without(*(_TOWER + each for each in unused))

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        kind = text_kind(hf_config, _TEXTS, "llama")
        nested = {**hf_config, "text_config": hf_config.get("text_config") or {}}
        text = read_text_config(nested, LLAVA_TEXTS[kind])
        config = _TEXTS[kind].read_config(text, generation_config)
        return replace(config, vision=read_llava_vision(hf_config, config.hidden_size))
