"""DeepSeek-V2, V2-Lite and Coder-V2 (arXiv:2405.04434): latent attention, many small experts."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import grouped_parts, rotated_last
from ostinato.models.config.hf_fields import HFConfig, read_name, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.latent_fields import read_latent_config
from ostinato.models.config_json.moe_fields import read_deepseek_experts
from ostinato.models.decoder import LLAMA_NAMES, Decoder
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.ops.moe.routing import Scoring

__all__ = ("DeepseekV2ForCausalLM", "latent_layout")

_MUST_BE = {"norm_topk_prob": False, "scoring_func": "softmax"}
_GROUP_TOP = {"greedy": None, "group_limited_greedy": 1}  # by topk_method, see `RouteSpec`
_LAYOUT = CheckpointLayout(
    renamed=(
        *LLAMA_NAMES,
        ("q_a_norm.", "q_a_layernorm."),
        ("kv_a_norm.", "kv_a_layernorm."),
        ("mlp.score_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.shared_expert.", "mlp.shared_experts."),
    ),
    ignored=(r"rotary_emb\.inv_freq$",),
)


class DeepseekV2ForCausalLM(Decoder):
    """Llama with latent attention and experts."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, _MUST_BE)
        method = read_name(hf_config, "topk_method", _GROUP_TOP, "greedy")
        config = read_latent_config(hf_config, generation_config)
        moe = read_deepseek_experts(
            hf_config,
            config.num_layers,
            scoring=Scoring.softmax,
            renormalize=False,
            group_top=_GROUP_TOP[method],
        )
        return replace(config, moe=moe)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        layout = latent_layout(config)
        # The layer after the last one is the next-token layer (models/draft_heads/next_token.py).
        extra = rf"^model\.layers\.{config.num_layers}\."
        self.checkpoint_layout = replace(layout, ignored=(*layout.ignored, extra))


def latent_layout(config: ModelConfig) -> CheckpointLayout:
    """How checkpoints of DeepSeek name and order the tensors of a block with latent attention."""
    spec, num_heads = config.latent, config.num_heads
    assert spec is not None, "read_config gives one"
    queries, shared = (
        rotated_last(heads, size, spec.rope_dim, is_interleaved=spec.is_interleaved)
        for heads, size in (
            (num_heads, config.head_dim),
            (1, spec.kv_rank + spec.rope_dim),
        )
    )
    plain = config.head_dim - spec.rope_dim
    first = "q_a_proj" if spec.query_rank else "q_proj"
    return replace(
        _LAYOUT,
        merged=(
            ("qkv_a_proj", (first, "kv_a_proj_with_mqa")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ),
        row_orders=(
            ("q_b_proj" if spec.query_rank else "q_proj", queries),
            ("kv_a_proj_with_mqa", shared),
            ("kv_b_proj", grouped_parts(num_heads, plain, config.value_dim)),
        ),
    )
