"""BLOOM (arXiv:2211.05100): ALiBi instead of position embeddings, and a norm of the embeddings."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import per_head_qkv
from ostinato.models.config.block_spec import BlockSpec, NormKind
from ostinato.models.config.hf_fields import HFConfig, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.ops.alibi import alibi_slopes

__all__ = ("BloomForCausalLM",)

_KEYS = DecoderKeys(
    hidden_size=("n_embed", "hidden_size"),
    intermediate_size=(),  # always four times the hidden size
    mlp_ratio=4,
    num_layers=("n_layer", "num_hidden_layers"),
    num_heads=("n_head", "num_attention_heads"),
    max_positions=("seq_length", "max_position_embeddings"),
    default_positions=2048,
    norm_eps="layer_norm_epsilon",
    default_norm_eps=1e-5,
    default_activation="gelu_pytorch_tanh",
    is_tied=True,
    has_rope=False,
)
_BLOCK = BlockSpec(norm=NormKind.layer, qkv_bias=True, out_bias=True, is_gated=False, mlp_bias=True)
_LAYOUT = CheckpointLayout(
    prefixes=("transformer.",),
    embedding="word_embeddings.weight",
    renamed=(
        ("embed_tokens.", "word_embeddings."),
        ("embed_norm.", "word_embeddings_layernorm."),
        ("layers.", "h."),
        ("self_attn.qkv_proj.", "self_attention.query_key_value."),
        ("self_attn.o_proj.", "self_attention.dense."),
        ("mlp.up_proj.", "mlp.dense_h_to_4h."),
        ("mlp.down_proj.", "mlp.dense_4h_to_h."),
        ("attention_norm.", "input_layernorm."),
        ("mlp_norm.", "post_attention_layernorm."),
        ("final_norm.", "ln_f."),
    ),
)


class BloomForCausalLM(Decoder):
    """A decoder with layer norms and a plain MLP. A head's q, k and v rows are adjacent."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, {"apply_residual_connection_post_layernorm": False})
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        slopes = alibi_slopes(config.num_heads)
        return replace(config, block=_BLOCK, alibi_slopes=slopes, has_embedding_norm=True)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        order = per_head_qkv(config.num_heads, config.head_dim)
        self.checkpoint_layout = replace(_LAYOUT, row_orders=(("qkv_proj", order),))
