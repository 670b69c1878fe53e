"""OPT (arXiv:2205.01068): learned positions that begin at 2, ReLU, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.block_spec import BlockSpec, NormKind
from ostinato.models.config.hf_fields import HFConfig, read_flag, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder

__all__ = ("OPTForCausalLM",)

_KEYS = DecoderKeys(
    intermediate_size=("ffn_dim", "intermediate_size"),
    norm_eps="layer_norm_eps",  # configs do not have it, so the default is used
    default_norm_eps=1e-5,
    activation="activation_function",
    default_activation="relu",
    is_tied=True,
    has_rope=False,
)
# Of the published models, only 350M normalises after each sublayer and projects its embeddings.
_MUST_BE = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
}


class OPTForCausalLM(Decoder):
    """A decoder with learned positions, layer norms and a plain MLP."""

    checkpoint_layout = CheckpointLayout(
        prefixes=("model.decoder.", "decoder."),
        renamed=(
            ("attention_norm.", "self_attn_layer_norm."),
            ("o_proj.", "out_proj."),
            ("mlp_norm.", "final_layer_norm."),
            ("mlp.up_proj.", "fc1."),
            ("mlp.down_proj.", "fc2."),
            ("final_norm.", "final_layer_norm."),
        ),
        merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")),),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, _MUST_BE)
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        width = hf_config.get("word_embed_proj_dim")
        if width not in (None, config.hidden_size):
            raise ValueError(
                f"config.json: word_embed_proj_dim={width} is not supported; it must be "
                f"hidden_size={config.hidden_size}"
            )
        has_bias = read_flag(hf_config, "enable_bias", True)
        block = BlockSpec(
            norm=NormKind.layer,
            qkv_bias=has_bias,
            out_bias=has_bias,
            is_gated=False,
            mlp_bias=has_bias,
        )
        return replace(config, block=block, position_offset=2)
