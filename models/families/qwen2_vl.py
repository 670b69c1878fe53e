"""Qwen2-VL and Qwen2.5-VL (arXiv:2409.12191, 2502.13923): Qwen2 with images"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, architecture_of
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.nested_fields import (
    flat_axes,
    read_text_config,
    take_sections,
)
from ostinato.models.config_json.rope_fields import with_theta
from ostinato.models.config_json.text_defaults import QWEN2_VL_TEXT
from ostinato.models.config_json.towers.qwen_tower_fields import (
    read_qwen2_5_vision,
    read_qwen2_vision,
)
from ostinato.models.families.qwen2 import Qwen2ForCausalLM
from ostinato.models.step_tensors import GridTensors

__all__ = ("Qwen2VLForConditionalGeneration",)

_THETA = 1_000_000.0
_SECTIONS = (16, 24, 24)
_BASE = Qwen2ForCausalLM.checkpoint_layout
_LAYOUT = replace(
    _BASE,
    prefixes=("model.", "language_model.", "model."),
    unprefixed=("visual.",),
    tower=(r"(^|\.)visual\.",),
    renamed=(
        *_BASE.renamed,
        ("vision.", "visual."),
        ("visual.patch_embed.", "visual.patch_embed.proj."),
        ("visual.merger.norm.", "visual.merger.ln_q."),
        ("visual.merger.fc1.", "visual.merger.mlp.0."),
        ("visual.merger.fc2.", "visual.merger.mlp.2."),
    ),
)


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2 with a vision tower, and with positions on the axes time, row and column."""

    step_tensors = GridTensors
    checkpoint_layout = _LAYOUT

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        text = read_text_config(hf_config, QWEN2_VL_TEXT)
        text, sections = take_sections(text, _SECTIONS, is_interleaved=False)
        config = super().read_config(with_theta(text, _THETA), generation_config)
        is_second = architecture_of(hf_config).startswith("Qwen2_5")
        read_vision = read_qwen2_5_vision if is_second else read_qwen2_vision
        return replace(
            config,
            vision=read_vision(hf_config, config.hidden_size),
            rope_axes=flat_axes(sections, config.rope),
        )
