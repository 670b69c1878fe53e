"""Qwen3-Next (Alibaba 2025): gated delta nets in three of four layers, gated attention, experts"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import gated_delta_orders, gated_queries
from ostinato.models.config.hf_fields import HFConfig, read_flag, read_integer
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config.recurrent_spec import DeltaSpec
from ostinato.models.config_json.hybrid_layers import read_gated_delta_config
from ostinato.models.config_json.moe_fields import read_route, sparse_layers
from ostinato.models.decoder import Decoder
from ostinato.models.families.qwen2_moe import Qwen2MoeForCausalLM
from ostinato.models.layers.linear_layers import BuildOptions

__all__ = ("QWEN3_NEXT_LAYOUT", "SEPARATE_LAYOUT", "Qwen3NextForCausalLM")

_BASE = Qwen2MoeForCausalLM.checkpoint_layout
QWEN3_NEXT_LAYOUT = CheckpointLayout(
    renamed=(
        *_BASE.renamed,
        ("mixer.in_proj.", "linear_attn.in_proj_qkvz."),
        ("mixer.gates.", "linear_attn.in_proj_ba."),
        ("mixer.conv", "linear_attn.conv1d.weight"),
        ("mixer.a_log", "linear_attn.A_log"),
        ("mixer.norm", "linear_attn.norm.weight"),
        ("mixer.", "linear_attn."),
    ),
    merged=(
        *_BASE.merged[1:],
        # A head of the stored queries has its gates after its queries.
        ("qkv_proj", ("q_proj", "q_proj", "k_proj", "v_proj")),
    ),
    ignored=(*_BASE.ignored, r"^mtp\."),
)
"""How checkpoints name the tensors of a block. Layers for multi-token prediction are not used."""

SEPARATE_LAYOUT = replace(
    QWEN3_NEXT_LAYOUT,
    renamed=tuple(
        (ours, theirs)
        for ours, theirs in QWEN3_NEXT_LAYOUT.renamed
        if ours not in ("mixer.in_proj.", "mixer.gates.")
    ),
    merged=(
        *QWEN3_NEXT_LAYOUT.merged,
        ("in_proj", ("in_proj_qkv",) * 3 + ("in_proj_z",)),
        ("gates", ("in_proj_b", "in_proj_a")),
    ),
)
"""The same with four projections for a gated delta net: in Qwen3.5, and in GGUF files."""


class Qwen3NextForCausalLM(Decoder):
    """Qwen3 with a shared expert, gates on the results of attention, and gated delta nets."""

    checkpoint_layout = QWEN3_NEXT_LAYOUT
    gguf_layout = SEPARATE_LAYOUT

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_gated_delta_config(hf_config, generation_config)
        moe = MoESpec(
            route=read_route(hf_config, renormalize=read_flag(hf_config, "norm_topk_prob", True)),
            intermediate_size=read_integer(hf_config, "moe_intermediate_size"),
            layers=sparse_layers(hf_config, config.num_layers),
            shared_size=read_integer(hf_config, "shared_expert_intermediate_size"),
            shared_gate=True,
        )
        return replace(config, moe=moe)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        orders = [("q_proj", gated_queries(config.num_heads, config.head_dim))]
        self.gguf_layout = replace(SEPARATE_LAYOUT, row_orders=tuple(orders))
        if isinstance(config.recurrent, DeltaSpec):
            orders += gated_delta_orders(config.recurrent)
        self.checkpoint_layout = replace(self.checkpoint_layout, row_orders=tuple(orders))
