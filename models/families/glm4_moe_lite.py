"""GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3 with other sizes."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, refuse_other_kinds, with_defaults
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.families.deepseek_v3 import DeepseekV3ForCausalLM

__all__ = ("Glm4MoeLiteForCausalLM",)

_DEFAULTS = {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
}


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3 with other sizes."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = super().read_config(with_defaults(hf_config, _DEFAULTS), generation_config)
        kinds = hf_config.get("mlp_layer_types")
        if kinds is None:
            return config
        refuse_other_kinds("mlp_layer_types", kinds, ("dense", "sparse"), config.num_layers)
        assert config.moe is not None, "the base class reads the experts"
        layers = tuple(kind == "sparse" for kind in kinds)
        return replace(config, moe=replace(config.moe, layers=layers))
