"""GPT-2 (Radford et al., 2019): learned positions, layer norms, biases everywhere, a plain MLP."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.block_spec import BlockSpec, NormKind
from ostinato.models.config.hf_fields import HFConfig, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder

__all__ = ("GPT2LMHeadModel",)

_KEYS = DecoderKeys(
    hidden_size=("n_embd", "hidden_size"),
    intermediate_size=("n_inner", "intermediate_size"),
    mlp_ratio=4,
    num_layers=("n_layer", "num_hidden_layers"),
    num_heads=("n_head", "num_attention_heads"),
    max_positions=("n_positions", "max_position_embeddings"),
    norm_eps="layer_norm_epsilon",
    default_norm_eps=1e-5,
    activation="activation_function",
    default_activation="gelu_new",
    is_tied=True,
    has_rope=False,
)
_MUST_BE = {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True}


class GPT2LMHeadModel(Decoder):
    """A decoder with learned positions. Checkpoints store its matrices as [in, out]."""

    checkpoint_layout = CheckpointLayout(
        prefixes=("transformer.",),
        embedding="wte.weight",
        renamed=(
            ("embed_tokens.", "wte."),
            ("embed_positions.", "wpe."),
            ("layers.", "h."),
            ("attention_norm.", "ln_1."),
            ("self_attn.qkv_proj.", "attn.c_attn."),
            ("self_attn.o_proj.", "attn.c_proj."),
            ("mlp_norm.", "ln_2."),
            ("mlp.up_proj.", "mlp.c_fc."),
            ("mlp.down_proj.", "mlp.c_proj."),
            ("final_norm.", "ln_f."),
        ),
        transposed=("qkv_proj", "o_proj", "up_proj", "down_proj"),
        ignored=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),  # causal masks of old checkpoints
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, _MUST_BE)
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        block = BlockSpec(
            norm=NormKind.layer, qkv_bias=True, out_bias=True, is_gated=False, mlp_bias=True
        )
        return replace(config, block=block)
