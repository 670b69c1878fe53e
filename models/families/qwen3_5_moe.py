"""Qwen3.5 with a mixture of experts (Alibaba 2026), such as Qwen3.5-35B-A3B; images too"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.checkpoints.tower_layouts import with_qwen3_tower
from ostinato.models.config.hf_fields import HFConfig, read_integer, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.moe_fields import every_layer, read_route
from ostinato.models.config_json.nested_fields import read_text_config
from ostinato.models.config_json.text_defaults import QWEN3_5_MOE_TEXT
from ostinato.models.families.qwen3_5 import (
    Qwen3_5ForCausalLM,
    read_qwen3_5_config,
    with_qwen3_5_vision,
)
from ostinato.models.step_tensors import GridTensors

__all__ = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")

_BASE = Qwen3_5ForCausalLM.checkpoint_layout
_STACKS = ("experts.gate_up_proj", "experts.down_proj")


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """The decoder of Qwen3-Next with other names in checkpoints."""

    checkpoint_layout = replace(
        _BASE,
        renamed=(
            *_BASE.renamed,
            *((f"{name}.weight", name) for name in _STACKS),
        ),
        stacked=_STACKS,
        can_be_apart=True,  # Alibaba stacks the experts, and transformers stores them one by one
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        # The models of transformers always divide the weights of a token's experts by their sum.
        refuse_other_values(hf_config, {"norm_topk_prob": True})
        # No block has an MLP of another size.
        size = read_integer(hf_config, "moe_intermediate_size")
        stated = {**hf_config, "intermediate_size": size}
        config = read_qwen3_5_config(stated, generation_config)
        moe = MoESpec(
            route=read_route(hf_config),
            intermediate_size=size,
            layers=every_layer(config.num_layers),
            shared_size=read_integer(hf_config, "shared_expert_intermediate_size"),
            shared_gate=True,
        )
        return replace(config, moe=moe)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The same with the vision tower of Qwen3-VL; the decoder reads the tower's last layer only."""

    step_tensors = GridTensors
    checkpoint_layout = with_qwen3_tower(Qwen3_5MoeForCausalLM.checkpoint_layout)

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        text = read_text_config(hf_config, QWEN3_5_MOE_TEXT)
        return with_qwen3_5_vision(super().read_config(text, generation_config), hf_config, text)
