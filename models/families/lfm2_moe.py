"""LFM2 with a mixture of experts (Liquid AI 2025), such as LFM2-8B-A1B: sigmoid routing"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, read_flag, read_integer
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.hybrid_layers import read_lfm2_config
from ostinato.models.config_json.moe_fields import read_scaled_route
from ostinato.models.families.lfm2 import Lfm2ForCausalLM

__all__ = ("Lfm2MoeForCausalLM",)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts after the first layers. A bias can change which of them are chosen."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_lfm2_config(hf_config, generation_config, has_experts=True)
        num_dense = read_integer(hf_config, "num_dense_layers", default=2, at_least=0)
        moe = MoESpec(
            # transformers adds 1e-6 to the sum of the weights by which they are divided. That
            # changes them less than the rounding of bfloat16.
            route=read_scaled_route(hf_config),
            intermediate_size=read_integer(hf_config, "moe_intermediate_size"),
            layers=tuple(layer >= num_dense for layer in range(config.num_layers)),
            has_score_bias=read_flag(hf_config, "use_expert_bias", True),
        )
        return replace(config, moe=moe)
