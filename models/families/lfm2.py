"""LFM2 (arXiv:2511.23404): gated short convolutions in most layers, attention in the others"""

from __future__ import annotations

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.hybrid_layers import read_lfm2_config
from ostinato.models.decoder import Decoder

__all__ = ("LFM2_LAYOUT", "Lfm2ForCausalLM")

LFM2_LAYOUT = CheckpointLayout(
    renamed=(
        ("attention_norm.", "operator_norm."),
        ("mlp_norm.", "ffn_norm."),
        ("final_norm.", "embedding_norm."),
        ("q_norm.", "q_layernorm."),
        ("k_norm.", "k_layernorm."),
        ("o_proj.", "out_proj."),
        ("mixer.conv_bias", "conv.conv.bias"),
        ("mixer.conv", "conv.conv.weight"),
        ("mixer.", "conv."),
        ("mlp.score_bias", "mlp.expert_bias"),
        ("mlp.", "feed_forward."),
        ("down_proj.", "w2."),
    ),
    merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("w1", "w3"))),
)
"""How checkpoints name the tensors of a block, with or without experts."""


class Lfm2ForCausalLM(Decoder):
    """Llama with normalised heads, and with convolutions in place of attention in most layers."""

    checkpoint_layout = LFM2_LAYOUT

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        return read_lfm2_config(hf_config, generation_config)
