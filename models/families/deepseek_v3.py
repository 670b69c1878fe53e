"""DeepSeek-V3, R1 and Kimi K2 (arXiv:2412.19437): latent attention, sigmoid routing in groups."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, refuse_other_values, with_defaults
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.latent_fields import read_latent_config
from ostinato.models.config_json.moe_fields import read_deepseek_experts
from ostinato.models.families.deepseek_v2 import DeepseekV2ForCausalLM

__all__ = ("DeepseekV3ForCausalLM",)

_MUST_BE = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_DEFAULTS = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V2 whose experts are chosen by score + bias; the scores are sigmoids."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, _MUST_BE)
        config = read_latent_config(hf_config, generation_config)
        stated = with_defaults(hf_config, _DEFAULTS)
        return replace(config, moe=read_deepseek_experts(stated, config.num_layers))
