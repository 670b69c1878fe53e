"""GLM-4.5 (arXiv:2508.06471): sigmoid routing in groups, a shared expert, dense first blocks."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.block_spec import QKNorm
from ostinato.models.config.hf_fields import HFConfig, read_flag, with_defaults
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.moe_fields import read_deepseek_experts
from ostinato.models.decoder import LLAMA_NAMES
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.layers.linear_layers import BuildOptions

__all__ = ("GLM4_MOE_LAYOUT", "Glm4MoeForCausalLM")

_KEYS = DecoderKeys(default_norm_eps=1e-5, rotary_fraction=0.5)
GLM4_MOE_LAYOUT = CheckpointLayout(
    renamed=(
        *LLAMA_NAMES,
        ("mlp.score_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.shared_expert.", "mlp.shared_experts."),
    ),
    merged=LlamaForCausalLM.checkpoint_layout.merged,
    ignored=LlamaForCausalLM.checkpoint_layout.ignored,
)
"""How checkpoints name the tensors of a block."""


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """Llama with the experts of DeepSeek-V3."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        qk_norm = QKNorm.head if read_flag(hf_config, "use_qk_norm", False) else QKNorm.none
        stated = with_defaults(hf_config, {"first_k_dense_replace": 1})
        return replace(
            config,
            moe=read_deepseek_experts(stated, config.num_layers),
            block=replace(config.block, qk_norm=qk_norm, out_bias=False),
        )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        # The layer after the last one is the next-token layer (models/draft_heads/next_token.py).
        extra = rf"^model\.layers\.{config.num_layers}\."
        layout = GLM4_MOE_LAYOUT
        self.checkpoint_layout = replace(layout, ignored=(*layout.ignored, extra))
