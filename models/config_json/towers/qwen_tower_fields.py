"""Reads the vision towers of Qwen-VL from a config.json; every error names the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ostinato.models.config.hf_fields import HFConfig, read_first, read_number, refuse_other_values
from ostinato.models.config.vision_config import TowerKind, VisionConfig
from ostinato.models.config_json.torch_fields import read_activation
from ostinato.models.config_json.towers.tower_fields import (
    PLACE,
    checked_tower,
    spatial_theta,
    tower_count,
    tower_fields,
    tower_integer,
    tower_integers,
)

__all__ = (
    "read_qwen2_5_vision",
    "read_qwen2_vision",
    "read_qwen3_5_vision",
    "read_qwen3_vision",
)

_QWEN_EPS = 1e-6  # of all norms; no config states it
_DEEP = "deepstack_visual_indexes"


def read_qwen2_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower of Qwen2-VL (arXiv:2409.12191).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: a key is missing or has a value that is not supported, or the tower's results
            are not of the decoder's size.
    """
    fields = tower_fields(hf_config)
    hidden_size = tower_integer(fields, "embed_dim", 1280)
    ratio = read_number(fields, PLACE + "mlp_ratio", 4, above=0)
    config = VisionConfig(
        kind=TowerKind.qwen2,
        hidden_size=hidden_size,
        intermediate_size=int(hidden_size * ratio),
        activation=read_activation(fields, PLACE + "hidden_act", "quick_gelu"),
        **_qwen_fields(fields, output_size, "hidden_size", depth=32, patch_size=14),
    )
    return checked_tower(config, "num_heads", rotates=True)


def read_qwen2_5_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower of Qwen2.5-VL (arXiv:2502.13923).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: as `read_qwen2_vision`.
    """
    fields = tower_fields(hf_config)
    shared = _qwen_fields(fields, output_size, "out_hidden_size", depth=32, patch_size=14)
    window_size = tower_integer(fields, "window_size", 112)
    window = window_size // shared["merge_size"] // shared["patch_size"]
    if not window:
        raise ValueError(
            f"config.json: vision_config.window_size={window_size} must be at least the "
            f"{shared['merge_size'] * shared['patch_size']} pixels of an embedding"
        )
    full = read_first(fields, PLACE + "fullatt_block_indexes", default=(7, 15, 23, 31))
    config = VisionConfig(
        kind=TowerKind.qwen2_5,
        hidden_size=tower_integer(fields, "hidden_size", 3584),
        intermediate_size=tower_integer(fields, "intermediate_size", 3420),
        activation=read_activation(fields, PLACE + "hidden_act", "silu"),
        window=window,
        full_layers=tower_integers("fullatt_block_indexes", full),
        **shared,
    )
    return checked_tower(config, "num_heads", rotates=True)


def read_qwen3_vision(hf_config: HFConfig, output_size: int, num_layers: int) -> VisionConfig:
    """The tower of Qwen3-VL (arXiv:2511.21631).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.
        num_layers: layers of the decoder.

    Raises:
        ValueError: as `read_qwen2_vision`; or the decoder has too few layers for the merged layers.
    """
    fields = tower_fields(hf_config)
    config = _read_qwen3_tower(fields, output_size)
    stated = read_first(fields, PLACE + _DEEP, default=(8, 16, 24))
    deep, depth = tower_integers(_DEEP, stated), config.num_layers
    if len(set(deep)) < len(deep) or any(not 0 <= layer < depth for layer in deep):
        raise ValueError(
            f"config.json: {PLACE}{_DEEP}={list(deep)} must be different layers of the tower, 0 to "
            f"{depth - 1}"
        )
    if len(deep) >= num_layers:
        raise ValueError(
            f"config.json: {PLACE}{_DEEP} has {len(deep)} layers; a decoder of {num_layers} layers "
            f"can have at most {num_layers - 1}"
        )
    return replace(config, num_deep=len(deep), deep_layers=deep)


def read_qwen3_5_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower of Qwen3.5: that of Qwen3-VL without the results of earlier layers (DeepStack).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: as `read_qwen2_vision`.
    """
    fields = tower_fields(hf_config)
    refuse_other_values(fields, {PLACE + _DEEP: []})
    return _read_qwen3_tower(fields, output_size)


def _read_qwen3_tower(fields: Mapping[str, Any], output_size: int) -> VisionConfig:
    shared = _qwen_fields(fields, output_size, "out_hidden_size", depth=27, patch_size=16)
    num_positions = tower_integer(fields, "num_position_embeddings", 2304)
    if int(num_positions**0.5) ** 2 != num_positions:
        raise ValueError(
            f"config.json: vision_config.num_position_embeddings={num_positions} must be the "
            "square of an integer"
        )
    config = VisionConfig(
        kind=TowerKind.qwen3,
        hidden_size=tower_integer(fields, "hidden_size", 1152),
        intermediate_size=tower_integer(fields, "intermediate_size", 4304),
        activation=read_activation(fields, PLACE + "hidden_act", "gelu_pytorch_tanh"),
        num_positions=num_positions,
        **shared,
    )
    return checked_tower(config, "num_heads", rotates=True)


def _qwen_fields(
    fields: Mapping[str, Any], output_size: int, size_key: str, *, depth: int, patch_size: int
) -> dict[str, Any]:
    """The fields that the towers of Qwen share."""
    # `in_chans` is in older files. The models of transformers do not read it.
    refuse_other_values(fields, {PLACE + "in_channels": 3, PLACE + "in_chans": 3})
    size = tower_integer(fields, size_key, 3584)
    if size != output_size:
        raise ValueError(
            f"config.json: vision_config.{size_key}={size} is not the hidden size of the decoder, "
            f"{output_size}"
        )
    return {
        "output_size": output_size,
        "num_layers": tower_count(fields, "depth", depth),
        "num_heads": tower_integer(fields, "num_heads", 16),
        "norm_eps": _QWEN_EPS,
        "patch_size": tower_integer(fields, "patch_size", patch_size),
        "merge_size": tower_integer(fields, "spatial_merge_size", 2),
        "num_frames": tower_integer(fields, "temporal_patch_size", 2),
        "rope_theta": spatial_theta(fields),
    }
