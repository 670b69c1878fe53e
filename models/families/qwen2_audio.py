"""Qwen2-Audio and Audio Flamingo 3 (arXiv:2407.10759, 2507.08128): Qwen2 with sounds"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, architecture_of, read_flag, read_object
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.nested_fields import read_text_config, text_kind
from ostinato.models.config_json.text_defaults import QWEN2_TEXT
from ostinato.models.config_json.towers.sound_encoder_fields import (
    read_flamingo_sound,
    read_qwen2_sound,
)
from ostinato.models.families.qwen2 import Qwen2ForCausalLM
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.step_tensors import MediaTensors

__all__ = ("Qwen2AudioForConditionalGeneration",)

_BASE = Qwen2ForCausalLM.checkpoint_layout


class Qwen2AudioForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2 whose sound tokens have the projected states of an audio encoder."""

    step_tensors = MediaTensors
    checkpoint_layout = replace(
        _BASE,
        prefixes=("language_model.model.", "model.", "language_model.", "model."),
        unprefixed=("audio_tower.", "multi_modal_projector."),
        renamed=(
            ("sound.projector.", "multi_modal_projector."),
            ("sound.blocks.", "audio_tower.layers."),
            ("sound.position_embedding", "audio_tower.embed_positions.weight"),
            ("sound.final_norm.", "audio_tower.layer_norm."),
            ("sound.", "audio_tower."),
            (".norm1.", ".self_attn_layer_norm."),
            (".norm2.", ".final_layer_norm."),
            (".attn.", ".self_attn."),
            (".self_attn.proj.", ".self_attn.out_proj."),
            (".mlp.fc", ".fc"),
            *_BASE.renamed,
        ),
        merged=(*_BASE.merged, ("qkv", ("q_proj", "k_proj", "v_proj"))),
        tower=(r"(^|\.)audio_tower\.", r"(^|\.)multi_modal_projector\."),
    )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        if self.sound is not None:
            layers = range(self.sound.config.num_layers)
            # The keys of the encoder have no bias. Those of the decoder have one.
            zeros = (f"audio_tower.layers.{layer}.self_attn.k_proj.bias" for layer in layers)
            self.checkpoint_layout = replace(self.checkpoint_layout, zeros=tuple(zeros))

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        text_kind(hf_config, ("qwen2",), "qwen2")
        nested = read_object(hf_config, "text_config")
        # The key at the top level has no effect in transformers.
        is_tied = read_flag(nested, "tie_word_embeddings", False)
        text = read_text_config({**hf_config, "text_config": nested}, QWEN2_TEXT, is_tied=is_tied)
        config = super().read_config(text, generation_config)
        is_flamingo = architecture_of(hf_config).startswith("AudioFlamingo3")
        read_sound = read_flamingo_sound if is_flamingo else read_qwen2_sound
        return replace(config, sound=read_sound(hf_config, config.hidden_size))
