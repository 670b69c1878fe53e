"""OLMo 3 (arXiv:2512.13961): OLMo 2 with a window in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.layer_windows import layer_types_every, listed_windows
from ostinato.models.config_json.rope_fields import read_rope, rope_by_layer_type
from ostinato.models.families.olmo2 import Olmo2ForCausalLM
from ostinato.models.step_tensors import DEFAULT_ROPE, LOCAL_ROPE

__all__ = ("Olmo3ForCausalLM",)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 2 with windows. In older configs, layers with a window have no rotary scaling."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        stated = {"sliding_window": 4096, **hf_config, **layer_types_every(hf_config, 4)}
        everywhere, local = rope_by_layer_type(hf_config, theta=500_000.0, local_theta=500_000.0)
        stated = {key: value for key, value in stated.items() if not key.startswith("rope_")}
        config = super().read_config({**stated, **everywhere}, generation_config)
        windows = listed_windows(stated, config.num_layers)
        return replace(
            config,
            sliding_windows=windows,
            local_rope=read_rope(local, config.head_dim, config.max_model_len),
            rope_kinds=tuple(LOCAL_ROPE if window else DEFAULT_ROPE for window in windows),
        )
