"""GPT-NeoX and Pythia (arXiv:2204.06745, 2304.01373): parallel residual, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import per_head_qkv
from ostinato.models.config.block_spec import BlockSpec, NormKind, Residual
from ostinato.models.config.hf_fields import HFConfig, read_flag
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder
from ostinato.models.layers.linear_layers import BuildOptions

__all__ = ("GPTNeoXForCausalLM",)

_KEYS = DecoderKeys(
    norm_eps="layer_norm_eps",
    default_norm_eps=1e-5,
    default_activation="gelu",
    rotary_fraction=0.25,
)
_LAYOUT = CheckpointLayout(
    prefixes=("gpt_neox.",),
    head="embed_out.weight",
    embedding="embed_in.weight",
    renamed=(
        ("embed_tokens.", "embed_in."),
        ("self_attn.qkv_proj.", "attention.query_key_value."),
        ("self_attn.o_proj.", "attention.dense."),
        ("mlp.up_proj.", "mlp.dense_h_to_4h."),
        ("mlp.down_proj.", "mlp.dense_4h_to_h."),
        ("attention_norm.", "input_layernorm."),
        ("mlp_norm.", "post_attention_layernorm."),
        ("final_norm.", "final_layer_norm."),
        ("lm_head.", "embed_out."),
    ),
    # Causal masks and frequencies, which old checkpoints store.
    ignored=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
)


class GPTNeoXForCausalLM(Decoder):
    """A decoder with layer norms and a plain MLP. A head's q, k and v rows are adjacent."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        older = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
        stated = {new: hf_config[old] for new, old in older.items() if old in hf_config}
        config = read_decoder_config({**stated, **hf_config}, generation_config, _KEYS)
        has_bias = read_flag(hf_config, "attention_bias", True)
        is_parallel = read_flag(hf_config, "use_parallel_residual", True)
        block = BlockSpec(
            norm=NormKind.layer,
            residual=Residual.parallel if is_parallel else Residual.sequential,
            qkv_bias=has_bias,
            out_bias=has_bias,
            is_gated=False,
            mlp_bias=True,
        )
        return replace(config, block=block)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        order = per_head_qkv(config.num_heads, config.head_dim)
        self.checkpoint_layout = replace(_LAYOUT, row_orders=(("qkv_proj", order),))
