"""What the readers of all vision towers share.

Values that `vision_config` does not state are those of the config classes in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.models.config.hf_fields import (
    HFConfig,
    read_count,
    read_integer,
    read_number,
    read_object,
)
from ostinato.models.config.vision_config import VisionConfig

__all__ = (
    "PLACE",
    "checked_tower",
    "feature_layers",
    "spatial_theta",
    "tower_count",
    "tower_fields",
    "tower_integer",
    "tower_integers",
)

PLACE = "vision_config."
_SPATIAL_KEYS = {"rope_type", "rope_theta"}


def tower_fields(hf_config: HFConfig, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The object `vision_config`, with `vision_config.` before each key. So errors name the key."""
    stated = read_object(hf_config, "vision_config")
    values = (default or {}) if hf_config.get("vision_config") is None else stated
    return {f"{PLACE}{key}": value for key, value in values.items()}


def tower_integer(fields: Mapping[str, Any], key: str, default: int) -> int:
    return read_integer(fields, PLACE + key, default=default)


def tower_count(fields: Mapping[str, Any], key: str, default: int) -> int:
    """A number of layers."""
    return read_count(fields, PLACE + key, default=default)


def tower_integers(key: str, stated: object) -> tuple[int, ...]:
    """A list of integers."""
    if not isinstance(stated, Sequence) or any(type(each) is not int for each in stated):
        raise ValueError(
            f"config.json: vision_config.{key} must be a list of integers, got {stated!r}"
        )
    return tuple(stated)


def feature_layers(stated: Any, num_layers: int) -> tuple[int, ...]:
    """`vision_feature_layer`, counted from the first state.

    Raises:
        ValueError: the tower has no such state.
    """
    listed = [stated] if type(stated) is int else stated
    is_list = isinstance(listed, list | tuple) and bool(listed)
    if not is_list or any(
        type(each) is not int or not -num_layers - 1 <= each <= num_layers for each in listed
    ):
        raise ValueError(
            f"config.json: vision_feature_layer={stated!r} must be one or several of "
            f"{-num_layers - 1} to {num_layers}, the states of a tower of {num_layers} layers"
        )
    return tuple(each if each >= 0 else num_layers + 1 + each for each in listed)


def spatial_theta(fields: Mapping[str, Any]) -> float:
    """The base of the frequencies of a tower's rotary positions."""
    parameters = read_object(fields, PLACE + "rope_parameters")
    stated = {key: value for key, value in parameters.items() if value is not None}
    kind, unknown = stated.get("rope_type", "axial"), stated.keys() - _SPATIAL_KEYS
    # transformers reads `default` as `axial` here.
    if kind not in ("axial", "default"):
        raise ValueError(
            f"config.json: vision_config.rope_parameters.rope_type={kind!r} is not supported, only "
            "'axial'"
        )
    if unknown:
        raise ValueError(
            f"config.json: vision_config.rope_parameters with {', '.join(sorted(unknown))} is not "
            f"supported; its keys are {', '.join(sorted(_SPATIAL_KEYS))}"
        )
    theta = read_number(fields, PLACE + "rope_theta", 10_000.0, above=0)
    return read_number(stated, "rope_theta", theta, above=0)


def checked_tower(config: VisionConfig, heads_key: str, *, rotates: bool = False) -> VisionConfig:
    """The config, if its sizes fit each other."""
    hidden, heads = config.hidden_size, config.num_heads
    if hidden % heads or (rotates and config.head_dim % 4):
        multiple = "four times the number of heads" if rotates else "the number of heads"
        raise ValueError(
            f"config.json: vision_config: the hidden size {hidden} must be a multiple of "
            f"{multiple}, and {heads_key} is {heads}"
        )
    if config.image_size % config.patch_size:
        raise ValueError(
            f"config.json: vision_config.image_size={config.image_size} must be a multiple of "
            f"patch_size={config.patch_size}"
        )
    return config
