"""Mistral Small 3.1 and 3.2, Ministral 3 (Mistral AI 2025): Pixtral's tower before Mistral"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.checkpoints.tower_layouts import with_names_of, with_projector
from ostinato.models.config.hf_fields import HFConfig, read_first
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.nested_fields import read_text_config, text_kind
from ostinato.models.config_json.text_defaults import MISTRAL3_TEXT, MISTRAL3_TEXTS
from ostinato.models.config_json.towers.pixtral_tower_fields import read_mistral3_vision
from ostinato.models.decoder import Decoder
from ostinato.models.families.ministral3 import Ministral3ForCausalLM
from ostinato.models.families.mistral import MistralForCausalLM
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.step_tensors import MediaTensors

__all__ = ("Mistral3ForConditionalGeneration",)

# Both have the checkpoint layout of Llama.
_TEXTS = {"mistral": MistralForCausalLM, "ministral3": Ministral3ForCausalLM}


class Mistral3ForConditionalGeneration(Decoder):
    """A decoder whose image tokens have the merged and projected states of a vision tower."""

    step_tensors = MediaTensors
    checkpoint_layout = with_projector(MistralForCausalLM.checkpoint_layout)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        if config.vision is not None and self.vision is not None:
            self.checkpoint_layout = with_names_of(config.vision, self.checkpoint_layout)

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        nested = read_first(hf_config, "text_config", default=MISTRAL3_TEXT)
        kind = text_kind(hf_config, _TEXTS, "mistral")
        # A file that states no `tie_word_embeddings` belongs to a checkpoint with an output head.
        text = read_text_config({**hf_config, "text_config": nested}, MISTRAL3_TEXTS[kind])
        config = _TEXTS[kind].read_config(text, generation_config)
        return replace(
            config, vision=read_mistral3_vision(hf_config, config.hidden_size, config.norm_eps)
        )
