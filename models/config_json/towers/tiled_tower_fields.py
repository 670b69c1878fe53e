"""Reads the towers of InternVL and Idefics3 from a config.json; every error names the key."""

from __future__ import annotations

from ostinato.models.config.hf_fields import (
    HFConfig,
    read_flag,
    read_integer,
    read_name,
    read_number,
    read_object,
    refuse_other_values,
)
from ostinato.models.config.vision_config import TowerKind, VisionConfig
from ostinato.models.config_json.torch_fields import read_activation
from ostinato.models.config_json.towers.tower_fields import (
    PLACE,
    checked_tower,
    tower_count,
    tower_fields,
    tower_integer,
)
from ostinato.models.vision.image_processor_fields import edge_of, merged_edge

__all__ = ("read_idefics_vision", "read_intern_vision")

_NORMS = {"layer_norm": False, "rms_norm": True}


def read_intern_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower and the projector of InternVL (arXiv:2312.14238).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    fields = tower_fields(hf_config)
    refuse_other_values(fields, {PLACE + "num_channels": 3})
    refuse_other_values(hf_config, {"vision_feature_select_strategy": "default"})
    norm = read_name(fields, PLACE + "norm_type", _NORMS, "layer_norm")
    num_layers = tower_count(fields, "num_hidden_layers", 24)
    layer = hf_config.get("vision_feature_layer", -1)
    if type(layer) is not int or not -num_layers - 1 <= layer <= num_layers:
        raise ValueError(
            f"config.json: vision_feature_layer={layer!r} must be one of {-num_layers - 1} to "
            f"{num_layers}, the states of a tower of {num_layers} layers"
        )
    tower = read_object(hf_config, "vision_config")
    config = VisionConfig(
        kind=TowerKind.internvl,
        output_size=output_size,
        hidden_size=tower_integer(fields, "hidden_size", 1024),
        intermediate_size=tower_integer(fields, "intermediate_size", 4096),
        num_layers=num_layers,
        num_heads=tower_integer(fields, "num_attention_heads", 16),
        activation=read_activation(fields, PLACE + "hidden_act", "gelu"),
        norm_eps=read_number(fields, PLACE + "layer_norm_eps", 1e-6, at_least=0),
        patch_size=edge_of(tower, "patch_size", 14),
        image_size=edge_of(tower, "image_size", 448),
        feature_layers=(layer if layer >= 0 else num_layers + 1 + layer,),
        projector_activation=read_activation(hf_config, "projector_hidden_act", "gelu"),
        has_positions=read_flag(fields, PLACE + "use_absolute_position_embeddings", True),
        # Only the last state has a norm, if it is named by -1.
        has_last_norm=layer == -1 and not read_flag(fields, PLACE + "use_mean_pooling", True),
        qkv_bias=read_flag(fields, PLACE + "attention_bias", False),
        qk_norm=read_flag(fields, PLACE + "use_qk_norm", False),
        has_rms_norms=_NORMS[norm],
        merge_size=merged_edge(hf_config),
    )
    _check_merged(config, "downsample_ratio")
    return checked_tower(config, "num_attention_heads")


def read_idefics_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower and the connector of Idefics3 (arXiv:2408.12637).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    fields = tower_fields(hf_config)
    refuse_other_values(fields, {PLACE + "num_channels": 3})
    image_size = tower_integer(fields, "image_size", 224)
    patch_size = tower_integer(fields, "patch_size", 32)
    if image_size < patch_size:
        raise ValueError(
            f"config.json: vision_config.image_size={image_size} must be at least "
            f"patch_size={patch_size}"
        )
    config = VisionConfig(
        kind=TowerKind.idefics3,
        output_size=output_size,
        hidden_size=tower_integer(fields, "hidden_size", 1152),
        intermediate_size=tower_integer(fields, "intermediate_size", 3072),
        num_layers=tower_count(fields, "num_hidden_layers", 12),
        num_heads=tower_integer(fields, "num_attention_heads", 16),
        activation=read_activation(fields, PLACE + "hidden_act", "gelu_pytorch_tanh"),
        norm_eps=read_number(fields, PLACE + "layer_norm_eps", 1e-6, at_least=0),
        patch_size=patch_size,
        # Pixels at the end of an image that fill no patch have no effect.
        image_size=image_size // patch_size * patch_size,
        merge_size=read_integer(hf_config, "scale_factor", default=2),
    )
    return checked_tower(config, "num_attention_heads")


def _check_merged(config: VisionConfig, key: str) -> None:
    patches = config.image_size // config.patch_size
    if patches % config.merge_size:
        raise ValueError(
            f"config.json: {key} merges {config.merge_size} patches in a row, so "
            f"vision_config.image_size={config.image_size} must have a multiple of them, not "
            f"{patches}"
        )
