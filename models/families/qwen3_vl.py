"""Qwen3-VL (arXiv:2511.21631): Qwen3 with images, dense or with a mixture of experts"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.checkpoints.tower_layouts import with_qwen3_tower
from ostinato.models.config.hf_fields import HFConfig, read_flag, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.nested_fields import (
    interleaved_axes,
    read_text_config,
    take_sections,
)
from ostinato.models.config_json.rope_fields import with_theta
from ostinato.models.config_json.text_defaults import QWEN3_VL_MOE_TEXT, QWEN3_VL_TEXT
from ostinato.models.config_json.towers.qwen_tower_fields import read_qwen3_vision
from ostinato.models.families.qwen3 import Qwen3ForCausalLM
from ostinato.models.families.qwen3_moe import Qwen3MoeForCausalLM
from ostinato.models.step_tensors import GridTensors

__all__ = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")

_THETA = 500_000.0
_SECTIONS = (24, 20, 20)
_STACKS = ("experts.gate_up_proj", "experts.down_proj")


_TOWER = with_qwen3_tower(Qwen3ForCausalLM.checkpoint_layout)  # the same for Qwen3 with experts
_LAYOUT = replace(
    _TOWER,
    renamed=(*_TOWER.renamed, *((f"{name}.weight", name) for name in _STACKS)),
)


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3 with a vision tower that is also read by its first layers (DeepStack)."""

    step_tensors = GridTensors
    checkpoint_layout = _LAYOUT

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        text, sections = _text_of(hf_config, QWEN3_VL_TEXT)
        return _with_vision(super().read_config(text, generation_config), hf_config, sections)


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """The same with experts, which are stored as two stacks of matrices in each block.

    The matrices are [in, out] in the published checkpoints, and [out, in] in those that newer
    releases of transformers save.
    """

    step_tensors = GridTensors
    checkpoint_layout = replace(_LAYOUT, stacked=_STACKS, either_way=_STACKS)

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        text, sections = _text_of(hf_config, QWEN3_VL_MOE_TEXT)
        # The models of transformers always divide the weights of a token's experts by their sum.
        refuse_other_values(text, {"norm_topk_prob": True})
        return _with_vision(super().read_config(text, generation_config), hf_config, sections)


def _text_of(hf_config: HFConfig, defaults: HFConfig) -> tuple[HFConfig, tuple[int, ...]]:
    """The keys of the decoder, and the sections of its positions."""
    is_tied = read_flag(hf_config, "tie_word_embeddings", False)
    text = read_text_config(hf_config, defaults, is_tied=is_tied)
    refuse_other_values(text, {"use_sliding_window": False})
    text, sections = take_sections(text, _SECTIONS, is_interleaved=True)
    return with_theta(text, _THETA), sections


def _with_vision(
    config: ModelConfig, hf_config: HFConfig, sections: tuple[int, ...]
) -> ModelConfig:
    return replace(
        config,
        vision=read_qwen3_vision(hf_config, config.hidden_size, config.num_layers),
        rope_axes=interleaved_axes(sections, config.rope),
    )
