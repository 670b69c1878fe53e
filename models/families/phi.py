"""Phi-1, 1.5 and 2 (arXiv:2306.11644, 2309.05463): attention and MLP share one layer norm."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.block_spec import BlockSpec, NormKind, Residual
from ostinato.models.config.hf_fields import HFConfig, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder

__all__ = ("PhiForCausalLM",)

_KEYS = DecoderKeys(
    norm_eps="layer_norm_eps",
    default_norm_eps=1e-5,
    default_activation="gelu_new",
    rotary_fraction=0.5,
)
_BLOCK = BlockSpec(
    norm=NormKind.layer,
    residual=Residual.parallel_one_norm,
    qkv_bias=True,
    out_bias=True,
    is_gated=False,
    mlp_bias=True,
)


class PhiForCausalLM(Decoder):
    """A decoder with biases everywhere, also in the output head; RoPE on a part of each head."""

    checkpoint_layout = CheckpointLayout(
        renamed=(
            ("o_proj.", "dense."),
            ("mlp.up_proj.", "mlp.fc1."),
            ("mlp.down_proj.", "mlp.fc2."),
            ("attention_norm.", "input_layernorm."),
            ("final_norm.", "final_layernorm."),
        ),
        merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")),),
        ignored=(r"rotary_emb\.inv_freq$",),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        # A tied head cannot have a bias.
        refuse_other_values(hf_config, {"qk_layernorm": False, "tie_word_embeddings": False})
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        return replace(config, block=_BLOCK, head_bias=True)
