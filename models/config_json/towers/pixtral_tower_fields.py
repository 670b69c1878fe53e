"""Reads the vision towers of Pixtral and Mistral 3 from a config.json; errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.models.config.hf_fields import (
    HFConfig,
    read_flag,
    read_integer,
    read_name,
    refuse_other_values,
)
from ostinato.models.config.vision_config import TowerKind, VisionConfig
from ostinato.models.config_json.torch_fields import read_activation
from ostinato.models.config_json.towers.tower_fields import (
    PLACE,
    checked_tower,
    feature_layers,
    spatial_theta,
    tower_count,
    tower_fields,
    tower_integer,
)

__all__ = ("PIXTRAL", "read_mistral3_vision", "read_pixtral_vision")

PIXTRAL = "pixtral"
"""The model type of the tower."""

_NORM_EPS = 1e-5  # of all norms of the tower; no config states it
# The tower of a Mistral 3 config without `vision_config`.
_MISTRAL3_TOWER = {"model_type": PIXTRAL, "patch_size": 14}


def read_pixtral_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower and the projector of Pixtral (arXiv:2410.07073), whose config is one of LLaVA.

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    # The tower has no class token, which `default` would leave out.
    strategy = hf_config.get("vision_feature_select_strategy", "default")
    if strategy != "full":
        raise ValueError(
            f"config.json: vision_feature_select_strategy={strategy!r} is not supported with "
            "vision_config.model_type=pixtral; it must be 'full'"
        )
    fields = tower_fields(hf_config)
    shared = _read_shared(fields)
    config = VisionConfig(
        kind=TowerKind.pixtral,
        output_size=output_size,
        feature_layers=feature_layers(
            hf_config.get("vision_feature_layer", -2), shared["num_layers"]
        ),
        projector_activation=read_activation(hf_config, "projector_hidden_act", "gelu"),
        projector_bias=read_flag(hf_config, "multimodal_projector_bias", True),
        **shared,
    )
    return _checked(config, fields)


def read_mistral3_vision(
    hf_config: HFConfig, output_size: int, merger_norm_eps: float
) -> VisionConfig:
    """The tower, the merger and the projector of Mistral 3.

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.
        merger_norm_eps: `rms_norm_eps` of the decoder, which the norm before the merger has too.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    fields = tower_fields(hf_config, _MISTRAL3_TOWER)
    read_name(fields, PLACE + "model_type", (PIXTRAL,), PIXTRAL)
    shared = _read_shared(fields)
    stated = hf_config.get("vision_feature_layer", -1)
    layers = feature_layers(stated, shared["num_layers"])
    if len(layers) > 1:
        raise ValueError(
            f"config.json: vision_feature_layer={stated!r} is not supported; the merger of Mistral "
            "3 reads one state"
        )
    config = VisionConfig(
        kind=TowerKind.mistral3,
        output_size=output_size,
        feature_layers=layers,
        projector_activation=read_activation(hf_config, "projector_hidden_act", "gelu"),
        projector_bias=read_flag(hf_config, "multimodal_projector_bias", False),
        merge_size=read_integer(hf_config, "spatial_merge_size", default=2),
        merger_norm_eps=merger_norm_eps,
        **shared,
    )
    return _checked(config, fields)


def _read_shared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What both kinds of towers read from `vision_config`."""
    refuse_other_values(fields, {PLACE + "num_channels": 3})
    return {
        "hidden_size": tower_integer(fields, "hidden_size", 1024),
        "intermediate_size": tower_integer(fields, "intermediate_size", 4096),
        "num_layers": tower_count(fields, "num_hidden_layers", 24),
        "num_heads": tower_integer(fields, "num_attention_heads", 16),
        "activation": read_activation(fields, PLACE + "hidden_act", "gelu"),
        "norm_eps": _NORM_EPS,
        "patch_size": tower_integer(fields, "patch_size", 16),
        "rope_theta": spatial_theta(fields),
    }


def _checked(config: VisionConfig, fields: Mapping[str, Any]) -> VisionConfig:
    """The config, if its sizes fit each other."""
    config = checked_tower(config, "num_attention_heads", rotates=True)
    stated = fields.get(PLACE + "head_dim")
    if stated not in (None, config.head_dim):
        raise ValueError(
            f"config.json: vision_config.head_dim={stated!r} is not supported; it must be "
            f"hidden_size / num_attention_heads, which is {config.head_dim}"
        )
    return config
