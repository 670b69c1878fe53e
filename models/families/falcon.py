"""Falcon (arXiv:2311.16867): 7B has one key and value head; 11B, 40B, 180B and RW have several.

Attention and MLP run in parallel. They share a norm of the residual stream, or have one each. RW
(RefinedWeb) runs them one after the other, and has ALiBi instead of rotary positions.
"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import per_group_qkv
from ostinato.models.config.block_spec import BlockSpec, NormKind, Residual
from ostinato.models.config.hf_fields import HFConfig, read_flag, read_integer, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.ops.alibi import alibi_slopes

__all__ = ("FalconForCausalLM",)

_KEYS = DecoderKeys(
    hidden_size=("hidden_size", "n_embed"),
    intermediate_size=("ffn_hidden_size",),
    mlp_ratio=4,
    num_layers=("num_hidden_layers", "n_layer"),
    num_heads=("num_attention_heads", "n_head"),
    num_kv_heads=("num_kv_heads", "n_head_kv"),
    default_positions=2048,
    norm_eps="layer_norm_epsilon",
    default_norm_eps=1e-5,
    activation="activation",
    default_activation="gelu",
    is_tied=True,
)
_RENAMED = (
    ("embed_tokens.", "word_embeddings."),
    ("layers.", "h."),
    ("self_attn.qkv_proj.", "self_attention.query_key_value."),
    ("self_attn.o_proj.", "self_attention.dense."),
    ("mlp.up_proj.", "mlp.dense_h_to_4h."),
    ("mlp.down_proj.", "mlp.dense_4h_to_h."),
    ("final_norm.", "ln_f."),
)
_TWO_NORMS = (("attention_norm.", "ln_attn."), ("mlp_norm.", "ln_mlp."))
_ONE_NORM = (("attention_norm.", "input_layernorm."), ("mlp_norm.", "post_attention_layernorm."))


class FalconForCausalLM(Decoder):
    """A decoder with layer norms and a plain MLP."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        is_grouped = read_flag(hf_config, "new_decoder_architecture", False)
        if is_grouped:
            refuse_other_values(hf_config, {"parallel_attn": True})
            stated = hf_config
        else:
            # Configs of the older architecture can also state a number of key and value heads,
            # which has no effect.
            is_multi_query = read_flag(hf_config, "multi_query", True)
            stated = {**hf_config, "num_kv_heads": 1 if is_multi_query else None}
        config = read_decoder_config(stated, generation_config, _KEYS)
        has_bias = read_flag(hf_config, "bias", False)
        block = BlockSpec(
            norm=NormKind.layer,
            residual=_residual(hf_config, is_grouped),
            qkv_bias=has_bias,
            out_bias=has_bias,
            is_gated=False,
            mlp_bias=has_bias,
        )
        if not read_flag(hf_config, "alibi", False):
            return replace(config, block=block)
        # The slopes have the same scale as the products of queries and keys.
        slopes = alibi_slopes(config.num_heads, scale=config.head_dim**-0.5)
        return replace(config, block=block, rope=None, alibi_slopes=slopes)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        two_norms = config.block.residual is Residual.parallel
        # If there is one group, this is the identity: all queries, then the key, then the value.
        order = per_group_qkv(config.num_heads, config.num_kv_heads, config.head_dim)
        self.checkpoint_layout = CheckpointLayout(
            prefixes=("transformer.",),
            embedding="word_embeddings.weight",
            renamed=_RENAMED + (_TWO_NORMS if two_norms else _ONE_NORM),
            row_orders=(("qkv_proj", order),),
            ignored=(r"rotary_emb\.inv_freq$",),
        )


def _residual(hf_config: HFConfig, is_grouped: bool) -> Residual:
    if not read_flag(hf_config, "parallel_attn", True):
        return Residual.sequential
    num_norms = read_integer(hf_config, "num_ln_in_parallel_attn", default=1 + is_grouped)
    return Residual.parallel if is_grouped and num_norms == 2 else Residual.parallel_one_norm
