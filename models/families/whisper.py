"""Whisper (arXiv:2212.04356): an audio encoder and a decoder with cross attention to its states"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.audio_config import AudioEncoderConfig
from ostinato.models.config.block_spec import BlockSpec, NormKind
from ostinato.models.config.hf_fields import HFConfig, read_count, read_integer, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder
from ostinato.models.step_tensors import AudioTensors

__all__ = ("WhisperForConditionalGeneration",)

_KEYS = DecoderKeys(
    hidden_size=("d_model",),
    intermediate_size=("decoder_ffn_dim",),
    num_layers=("decoder_layers",),
    num_heads=("decoder_attention_heads",),
    num_kv_heads=("decoder_key_value_heads",),  # configs do not have it: as many as query heads
    max_positions=("max_target_positions",),
    default_positions=448,
    norm_eps="layer_norm_eps",  # configs do not have it, so the default is used
    default_norm_eps=1e-5,
    activation="activation_function",
    default_activation="gelu",
    is_tied=True,
    has_rope=False,
)
_MUST_BE = {"is_encoder_decoder": True, "scale_embedding": False}


class WhisperForConditionalGeneration(Decoder):
    """A decoder with learned positions, layer norms and a plain MLP, and its audio encoder."""

    step_tensors = AudioTensors
    checkpoint_layout = CheckpointLayout(
        prefixes=("model.decoder.", "model."),
        unprefixed=("encoder.",),
        head="proj_out.weight",
        renamed=(
            ("lm_head.", "proj_out."),
            ("audio.blocks.", "encoder.layers."),
            ("audio.position_embedding", "encoder.embed_positions.weight"),
            ("audio.", "encoder."),
            (".norm1.", ".self_attn_layer_norm."),
            (".norm2.", ".final_layer_norm."),
            (".attn.", ".self_attn."),
            (".mlp.fc", ".fc"),
            (".self_attn.proj.", ".self_attn.out_proj."),
            ("attention_norm.", "self_attn_layer_norm."),
            ("cross_norm.", "encoder_attn_layer_norm."),
            ("cross_attn.", "encoder_attn."),
            ("o_proj.", "out_proj."),
            ("mlp_norm.", "final_layer_norm."),
            ("mlp.up_proj.", "fc1."),
            ("mlp.down_proj.", "fc2."),
            ("final_norm.", "layer_norm."),
        ),
        merged=(
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("qkv", ("q_proj", "k_proj", "v_proj")),
            ("kv_proj", ("k_proj", "v_proj")),
        ),
        zeros=("k_proj.bias",),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, _MUST_BE)
        decoder = {**hf_config, "is_encoder_decoder": False}
        config = read_decoder_config(decoder, generation_config, _KEYS)
        block = BlockSpec(
            norm=NormKind.layer, qkv_bias=True, out_bias=True, is_gated=False, mlp_bias=True
        )
        audio = AudioEncoderConfig(
            num_bins=read_integer(hf_config, "num_mel_bins", default=80),
            num_positions=read_integer(hf_config, "max_source_positions", default=1500),
            hidden_size=config.hidden_size,
            intermediate_size=read_integer(hf_config, "encoder_ffn_dim"),
            num_layers=read_count(hf_config, "encoder_layers"),
            num_heads=read_integer(hf_config, "encoder_attention_heads"),
            activation=config.activation,
            norm_eps=config.norm_eps,
        )
        if config.hidden_size % audio.num_heads:
            raise ValueError(
                f"config.json: d_model={config.hidden_size} is not a multiple of "
                f"encoder_attention_heads={audio.num_heads}"
            )
        return replace(config, block=block, audio=audio)
