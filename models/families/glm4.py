"""GLM-4 0414 (arXiv:2406.12793): sandwich norms, interleaved RoPE on half of each head."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import interleaved_queries_and_keys
from ostinato.models.config.block_spec import BlockSpec, Residual
from ostinato.models.config.hf_fields import HFConfig, read_flag
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder
from ostinato.models.layers.linear_layers import BuildOptions

__all__ = ("Glm4ForCausalLM",)

_KEYS = DecoderKeys(default_norm_eps=1.5625e-07, rotary_fraction=0.5)
_LAYOUT = CheckpointLayout(
    renamed=(
        ("attention_norm.", "input_layernorm."),
        ("attention_out_norm.", "post_self_attn_layernorm."),
        ("mlp_norm.", "post_attention_layernorm."),
        ("mlp_out_norm.", "post_mlp_layernorm."),
        ("final_norm.", "norm."),
    ),
    merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")),),
    ignored=(r"rotary_emb\.inv_freq$",),
)


class Glm4ForCausalLM(Decoder):
    """A decoder with norms before and after attention and MLP; gate and up are stored merged."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        has_bias = read_flag(hf_config, "attention_bias", True)
        return replace(config, block=BlockSpec(residual=Residual.sandwich, qkv_bias=has_bias))

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        orders = interleaved_queries_and_keys(config)
        self.checkpoint_layout = replace(_LAYOUT, row_orders=orders)
