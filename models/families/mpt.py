"""MPT (MosaicML 2023): ALiBi, layer norms and linear layers without biases."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.block_spec import BlockSpec, NormKind
from ostinato.models.config.hf_fields import (
    HFConfig,
    read_cap,
    read_integer,
    read_number,
    read_object,
    refuse_other_values,
)
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder
from ostinato.ops.alibi import alibi_slopes

__all__ = ("MptForCausalLM",)

_KEYS = DecoderKeys(
    hidden_size=("d_model", "hidden_size"),
    intermediate_size=(),  # always `expansion_ratio` times the hidden size
    num_layers=("n_layers", "num_hidden_layers"),
    num_heads=("n_heads", "num_attention_heads"),
    max_positions=("max_seq_len",),
    default_positions=2048,
    norm_eps="layer_norm_epsilon",
    default_norm_eps=1e-5,
    default_activation="gelu",
    is_tied=True,
    has_rope=False,
)
_MUST_BE = {"no_bias": True, "logit_scale": None}
_ATTENTION_MUST_BE = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}
_BLOCK = BlockSpec(norm=NormKind.layer_without_bias, is_gated=False)


class MptForCausalLM(Decoder):
    """A decoder with a plain MLP; queries, keys and values are stored merged."""

    checkpoint_layout = CheckpointLayout(
        prefixes=("transformer.",),
        embedding="wte.weight",
        renamed=(
            ("embed_tokens.", "wte."),
            ("layers.", "blocks."),
            ("self_attn.qkv_proj.", "attn.Wqkv."),
            ("self_attn.o_proj.", "attn.out_proj."),
            ("attention_norm.", "norm_1."),
            ("mlp.", "ffn."),
            ("mlp_norm.", "norm_2."),
            ("final_norm.", "norm_f."),
        ),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, _MUST_BE)
        attention = read_object(hf_config, "attn_config")
        refuse_other_values(attention, _ATTENTION_MUST_BE)
        ratio = read_integer(hf_config, "expansion_ratio", default=4)
        config = read_decoder_config(hf_config, generation_config, replace(_KEYS, mlp_ratio=ratio))
        bias_max = read_number(attention, "alibi_bias_max", 8, above=0)
        scale = None
        if attention.get("softmax_scale") is not None:
            scale = read_number(attention, "softmax_scale", 0.0, above=0)
        return replace(
            config,
            block=_BLOCK,
            alibi_slopes=alibi_slopes(config.num_heads, bias_max=bias_max),
            attention_scale=scale,
            qkv_clip=read_cap(attention, "clip_qkv"),
        )
