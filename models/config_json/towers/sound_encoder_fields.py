"""Reads the audio encoder and the projector of a model that takes sounds; errors name the key.

Values that config.json does not state are those of the config classes in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostinato.models.config.audio_config import AudioEncoderConfig, SoundConfig
from ostinato.models.config.hf_fields import (
    HFConfig,
    read_count,
    read_flag,
    read_integer,
    read_object,
    refuse_other_values,
)
from ostinato.models.config_json.torch_fields import read_activation

__all__ = ("read_flamingo_sound", "read_qwen2_sound")

_PLACE = "audio_config."
_NORM_EPS = 1e-5  # of all norms; no config states it


def read_qwen2_sound(hf_config: HFConfig, output_size: int) -> SoundConfig:
    """The encoder and the projector of Qwen2-Audio (arXiv:2407.10759).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    encoder = _read_encoder(hf_config, "qwen2_audio_encoder")
    return SoundConfig(encoder=encoder, output_size=output_size)


def read_flamingo_sound(hf_config: HFConfig, output_size: int) -> SoundConfig:
    """The encoder and the projector of Audio Flamingo 3 (arXiv:2507.08128).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    return SoundConfig(
        encoder=_read_encoder(hf_config, "audioflamingo3_encoder"),
        output_size=output_size,
        has_hidden_layer=True,
        projector_activation=read_activation(hf_config, "projector_hidden_act", "gelu"),
        projector_bias=read_flag(hf_config, "projector_bias", True),
    )


def _read_encoder(hf_config: HFConfig, model_type: str) -> AudioEncoderConfig:
    """The object `audio_config`, which may be left out."""
    fields = _fields(hf_config)
    only = {_PLACE + "model_type": model_type, _PLACE + "scale_embedding": False}
    refuse_other_values(fields, only)
    config = AudioEncoderConfig(
        num_bins=_integer(fields, "num_mel_bins", default=128),
        num_positions=_integer(fields, "max_source_positions", default=1500),
        hidden_size=_integer(fields, "d_model", "hidden_size", default=1280),
        intermediate_size=_integer(fields, "encoder_ffn_dim", "intermediate_size", default=5120),
        num_layers=_integer(
            fields, "encoder_layers", "num_hidden_layers", default=32, read=read_count
        ),
        num_heads=_integer(fields, "encoder_attention_heads", "num_attention_heads", default=20),
        activation=read_activation(fields, _PLACE + "activation_function", "gelu"),
        norm_eps=_NORM_EPS,
    )
    if config.hidden_size % config.num_heads:
        raise ValueError(
            f"config.json: audio_config: the hidden size {config.hidden_size} must be a multiple "
            f"of the number of heads, which is {config.num_heads}"
        )
    if config.num_positions % 2:
        raise ValueError(
            f"config.json: audio_config.max_source_positions={config.num_positions} must be even, "
            "because an embedding is the mean of two states"
        )
    return config


def _fields(hf_config: HFConfig) -> dict[str, Any]:
    """The keys of `audio_config`, with their place, for errors."""
    return {_PLACE + key: value for key, value in read_object(hf_config, "audio_config").items()}


def _integer(
    fields: HFConfig, *names: str, default: int, read: Callable[..., int] = read_integer
) -> int:
    """An integer of at least 1. The names mean the same, in both families."""
    keys = [_PLACE + name for name in names if fields.get(_PLACE + name) is not None]
    values = [read(fields, key) for key in keys]
    if len(set(values)) > 1:
        shown = " and ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        raise ValueError(f"config.json: {shown} must be the same; remove one")
    return values[0] if values else default
