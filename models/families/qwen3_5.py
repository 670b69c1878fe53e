"""Qwen3.5 (Alibaba 2026): gated delta nets in three of four layers, gated attention, images"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.checkpoints.row_orders import gated_queries
from ostinato.models.checkpoints.tower_layouts import with_qwen3_tower
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.hybrid_layers import read_gated_delta_config
from ostinato.models.config_json.nested_fields import (
    interleaved_axes,
    read_text_config,
    take_sections,
)
from ostinato.models.config_json.text_defaults import QWEN3_5_TEXT
from ostinato.models.config_json.towers.qwen_tower_fields import read_qwen3_5_vision
from ostinato.models.decoder import Decoder
from ostinato.models.families.qwen3_next import SEPARATE_LAYOUT
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.step_tensors import GridTensors

__all__ = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "read_qwen3_5_config",
    "with_qwen3_5_vision",
)

_SECTIONS = (11, 11, 10)  # pairs of a head for each axis of a position


def read_qwen3_5_config(hf_config: HFConfig, generation_config: HFConfig | None) -> ModelConfig:
    """The configuration of a decoder of Qwen3.5 for texts, but not its experts.

    A token of a text has the same position on all axes. So the sections of M-RoPE have no effect.

    Raises:
        ValueError: as `read_gated_delta_config` and `take_sections`.
    """
    text, _ = take_sections(hf_config, _SECTIONS, is_interleaved=True)
    return read_gated_delta_config(text, generation_config)


def with_qwen3_5_vision(config: ModelConfig, hf_config: HFConfig, text: HFConfig) -> ModelConfig:
    """The configuration of a decoder, whose keys are `text`, with the tower of its checkpoint."""
    _, sections = take_sections(text, _SECTIONS, is_interleaved=True)
    return replace(
        config,
        vision=read_qwen3_5_vision(hf_config, config.hidden_size),
        rope_axes=interleaved_axes(sections, config.rope),
    )


class Qwen3_5ForCausalLM(Decoder):
    """The decoder of Qwen3-Next with an MLP in each block."""

    checkpoint_layout = SEPARATE_LAYOUT

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        return read_qwen3_5_config(hf_config, generation_config)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        orders = (("q_proj", gated_queries(config.num_heads, config.head_dim)),)
        self.checkpoint_layout = replace(self.checkpoint_layout, row_orders=orders)
        # In GGUF files each expert has a name of its own, also where checkpoints stack them.
        self.gguf_layout = replace(SEPARATE_LAYOUT, row_orders=orders)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The same with the vision tower of Qwen3-VL; the decoder reads the tower's last layer only."""

    step_tensors = GridTensors
    checkpoint_layout = with_qwen3_tower(SEPARATE_LAYOUT)

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        text = read_text_config(hf_config, QWEN3_5_TEXT)
        return with_qwen3_5_vision(super().read_config(text, generation_config), hf_config, text)
