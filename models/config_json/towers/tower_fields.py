"""What the readers of all vision towers share.

Values that `vision_config` does not state are those of the config classes in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.models.config.model_config import HFConfig
from ostinato.models.config.vision_config import VisionConfig
from ostinato.models.config_json.hf_fields import read_integer

__all__ = ("PLACE", "checked_tower", "tower_fields", "tower_integer", "tower_integers")

PLACE = "vision_config."


def tower_fields(hf_config: HFConfig, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The object `vision_config`, with `vision_config.` before each key. So errors name the key."""
    stated = hf_config.get("vision_config")
    if stated is not None and not isinstance(stated, Mapping):
        raise ValueError(f"config.json: vision_config must be an object, got {stated!r}")
    values = (default or {}) if stated is None else stated
    return {f"{PLACE}{key}": value for key, value in values.items()}


def tower_integer(fields: Mapping[str, Any], key: str, default: int) -> int:
    return read_integer(fields, PLACE + key, default=default)


def tower_integers(key: str, stated: object) -> tuple[int, ...]:
    """A list of integers."""
    if not isinstance(stated, Sequence) or any(type(each) is not int for each in stated):
        raise ValueError(
            f"config.json: vision_config.{key} must be a list of integers, got {stated!r}"
        )
    return tuple(stated)


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
