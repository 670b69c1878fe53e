"""LLaVA 1.5 and Pixtral (arXiv:2310.03744, 2410.07073): a tower before Llama, Mistral or Qwen"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.checkpoints.tower_layouts import with_names_of, with_projector
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
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


class LlavaForConditionalGeneration(Decoder):
    """A decoder whose image tokens have the projected states of a vision tower."""

    step_tensors = MediaTensors
    checkpoint_layout = with_projector(LlamaForCausalLM.checkpoint_layout)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        if config.vision is not None and self.vision is not None:
            self.checkpoint_layout = with_names_of(config.vision, self.checkpoint_layout)

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        kind = text_kind(hf_config, _TEXTS, "llama")
        nested = {**hf_config, "text_config": hf_config.get("text_config") or {}}
        text = read_text_config(nested, LLAVA_TEXTS[kind])
        config = _TEXTS[kind].read_config(text, generation_config)
        return replace(config, vision=read_llava_vision(hf_config, config.hidden_size))
