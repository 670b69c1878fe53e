"""StarCoder2 (arXiv:2402.19173): heads and window as in Mistral, layer norms, a plain MLP."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.block_spec import BlockSpec, NormKind
from ostinato.models.config.hf_fields import HFConfig, read_flag
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import listed_windows
from ostinato.models.decoder import LLAMA_NAMES, Decoder

__all__ = ("Starcoder2ForCausalLM",)

_KEYS = DecoderKeys(
    norm_eps="norm_epsilon",
    default_norm_eps=1e-5,
    default_activation="gelu_pytorch_tanh",
    is_tied=True,
    windows=listed_windows,
)


class Starcoder2ForCausalLM(Decoder):
    """A decoder with layer norms and a plain MLP, usually with biases."""

    checkpoint_layout = CheckpointLayout(
        renamed=(
            ("mlp.up_proj.", "mlp.c_fc."),
            ("mlp.down_proj.", "mlp.c_proj."),
            *LLAMA_NAMES,
        ),
        merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")),),
        ignored=(r"rotary_emb\.inv_freq$",),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        has_bias = read_flag(hf_config, "use_bias", True)
        block = BlockSpec(
            norm=NormKind.layer,
            qkv_bias=has_bias,
            out_bias=has_bias,
            is_gated=False,
            mlp_bias=has_bias,
        )
        return replace(config, block=block)
