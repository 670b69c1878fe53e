"""Reads the vision tower of a config.json; every error names the key.

Values that `vision_config` does not state are those of the config classes in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.models.config.model_config import HFConfig
from ostinato.models.config.vision_config import TowerKind, VisionConfig
from ostinato.models.config_json.hf_fields import (
    read_activation,
    read_first,
    read_integer,
    refuse_other_values,
)

__all__ = ("read_llava_vision", "read_qwen2_5_vision", "read_qwen2_vision", "read_qwen3_vision")

_PLACE = "vision_config."
_QWEN_EPS = 1e-6  # of all norms; no config states it
# The tower of a LLaVA config without `vision_config`.
_LLAVA_TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_LLAVA_KINDS = {"clip_vision_model": TowerKind.clip, "siglip_vision_model": TowerKind.siglip}
_SPATIAL_KEYS = {"rope_type", "rope_theta"}


def read_llava_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower and the projector of LLaVA 1.5 (arXiv:2310.03744).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: a key is missing, or has a value that is not supported.
    """
    fields = _fields(hf_config, _LLAVA_TOWER)
    name = fields.get(_PLACE + "model_type", "clip_vision_model")
    if name not in _LLAVA_KINDS:
        raise ValueError(
            f"config.json: vision_config.model_type={name} is not supported; supported: "
            f"{', '.join(_LLAVA_KINDS)}"
        )
    kind = _LLAVA_KINDS[name]
    refuse_other_values(fields, {_PLACE + "num_channels": 3})
    is_clip = kind is TowerKind.clip
    num_layers = _integer(fields, "num_hidden_layers", 12)
    strategy = hf_config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ValueError(
            f"config.json: vision_feature_select_strategy={strategy!r} is not supported; "
            "supported: default, full"
        )
    image_size, patch_size = (
        _integer(fields, "image_size", 224),
        _integer(fields, "patch_size", 32 if is_clip else 16),
    )
    config = VisionConfig(
        kind=kind,
        output_size=output_size,
        hidden_size=_integer(fields, "hidden_size", 768),
        intermediate_size=_integer(fields, "intermediate_size", 3072),
        num_layers=num_layers,
        num_heads=_integer(fields, "num_attention_heads", 12),
        activation=read_activation(
            fields, _PLACE + "hidden_act", "quick_gelu" if is_clip else "gelu_pytorch_tanh"
        ),
        norm_eps=float(
            read_first(fields, _PLACE + "layer_norm_eps", default=1e-5 if is_clip else 1e-6)
        ),
        patch_size=patch_size,
        image_size=image_size,
        feature_layers=_feature_layers(hf_config.get("vision_feature_layer", -2), num_layers),
        drops_first=strategy == "default",
        projector_activation=read_activation(hf_config, "projector_hidden_act", "gelu"),
        projector_bias=bool(hf_config.get("multimodal_projector_bias", True)),
    )
    return _checked(config, "num_attention_heads")


def read_qwen2_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower of Qwen2-VL (arXiv:2409.12191).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: as `read_llava_vision`; or the tower's results are not of the decoder's size.
    """
    fields = _fields(hf_config)
    hidden_size = _integer(fields, "embed_dim", 1280)
    ratio = read_first(fields, _PLACE + "mlp_ratio", default=4)
    config = VisionConfig(
        kind=TowerKind.qwen2,
        hidden_size=hidden_size,
        intermediate_size=int(hidden_size * ratio),
        activation=read_activation(fields, _PLACE + "hidden_act", "quick_gelu"),
        **_qwen_fields(fields, output_size, "hidden_size", depth=32, patch_size=14),
    )
    return _checked(config, "num_heads", rotates=True)


def read_qwen2_5_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower of Qwen2.5-VL (arXiv:2502.13923).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: as `read_qwen2_vision`.
    """
    fields = _fields(hf_config)
    shared = _qwen_fields(fields, output_size, "out_hidden_size", depth=32, patch_size=14)
    window_size = _integer(fields, "window_size", 112)
    window = window_size // shared["merge_size"] // shared["patch_size"]
    if not window:
        raise ValueError(
            f"config.json: vision_config.window_size={window_size} must be at least the "
            f"{shared['merge_size'] * shared['patch_size']} pixels of an embedding"
        )
    full = read_first(fields, _PLACE + "fullatt_block_indexes", default=(7, 15, 23, 31))
    config = VisionConfig(
        kind=TowerKind.qwen2_5,
        hidden_size=_integer(fields, "hidden_size", 3584),
        intermediate_size=_integer(fields, "intermediate_size", 3420),
        activation=read_activation(fields, _PLACE + "hidden_act", "silu"),
        window=window,
        full_layers=_integers("fullatt_block_indexes", full),
        **shared,
    )
    return _checked(config, "num_heads", rotates=True)


def read_qwen3_vision(hf_config: HFConfig, output_size: int, num_layers: int) -> VisionConfig:
    """The tower of Qwen3-VL (arXiv:2511.21631).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.
        num_layers: layers of the decoder.

    Raises:
        ValueError: as `read_qwen2_vision`; or the decoder has too few layers for the merged layers.
    """
    fields = _fields(hf_config)
    stated = read_first(fields, _PLACE + "deepstack_visual_indexes", default=(8, 16, 24))
    deep = _integers("deepstack_visual_indexes", stated)
    shared = _qwen_fields(fields, output_size, "out_hidden_size", depth=27, patch_size=16)
    depth = shared["num_layers"]
    if len(set(deep)) < len(deep) or any(not 0 <= layer < depth for layer in deep):
        raise ValueError(
            f"config.json: vision_config.deepstack_visual_indexes={list(deep)} must be different "
            f"layers of the tower, 0 to {depth - 1}"
        )
    if len(deep) >= num_layers:
        raise ValueError(
            f"config.json: vision_config.deepstack_visual_indexes has {len(deep)} layers; a "
            f"decoder of {num_layers} layers can have at most {num_layers - 1}"
        )
    num_positions = _integer(fields, "num_position_embeddings", 2304)
    if int(num_positions**0.5) ** 2 != num_positions:
        raise ValueError(
            f"config.json: vision_config.num_position_embeddings={num_positions} must be the "
            "square of an integer"
        )
    config = VisionConfig(
        kind=TowerKind.qwen3,
        hidden_size=_integer(fields, "hidden_size", 1152),
        intermediate_size=_integer(fields, "intermediate_size", 4304),
        activation=read_activation(fields, _PLACE + "hidden_act", "gelu_pytorch_tanh"),
        num_positions=num_positions,
        num_deep=len(deep),
        deep_layers=deep,
        **shared,
    )
    return _checked(config, "num_heads", rotates=True)


def _fields(hf_config: HFConfig, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The object `vision_config`, with `vision_config.` before each key. So errors name the key."""
    stated = hf_config.get("vision_config")
    if stated is not None and not isinstance(stated, Mapping):
        raise ValueError(f"config.json: vision_config must be an object, got {stated!r}")
    values = (default or {}) if stated is None else stated
    return {f"{_PLACE}{key}": value for key, value in values.items()}


def _integer(fields: Mapping[str, Any], key: str, default: int) -> int:
    return read_integer(fields, _PLACE + key, default=default)


def _integers(key: str, stated: object) -> tuple[int, ...]:
    """A list of integers."""
    if not isinstance(stated, Sequence) or any(type(each) is not int for each in stated):
        raise ValueError(
            f"config.json: vision_config.{key} must be a list of integers, got {stated!r}"
        )
    return tuple(stated)


def _qwen_fields(
    fields: Mapping[str, Any], output_size: int, size_key: str, *, depth: int, patch_size: int
) -> dict[str, Any]:
    """The fields that the towers of Qwen share."""
    # `in_chans` is in older files. The models of transformers do not read it.
    refuse_other_values(fields, {_PLACE + "in_channels": 3, _PLACE + "in_chans": 3})
    size = _integer(fields, size_key, 3584)
    if size != output_size:
        raise ValueError(
            f"config.json: vision_config.{size_key}={size} is not the hidden size of the decoder, "
            f"{output_size}"
        )
    return {
        "output_size": output_size,
        "num_layers": _integer(fields, "depth", depth),
        "num_heads": _integer(fields, "num_heads", 16),
        "norm_eps": _QWEN_EPS,
        "patch_size": _integer(fields, "patch_size", patch_size),
        "merge_size": _integer(fields, "spatial_merge_size", 2),
        "num_frames": _integer(fields, "temporal_patch_size", 2),
        "rope_theta": _spatial_theta(fields),
    }


def _spatial_theta(fields: Mapping[str, Any]) -> float:
    """The base of the frequencies of a tower's rotary positions."""
    parameters: HFConfig = fields.get(_PLACE + "rope_parameters") or {}
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
    theta = read_first(fields, _PLACE + "rope_theta", default=10_000.0)
    return float(stated.get("rope_theta", theta))


def _feature_layers(stated: Any, num_layers: int) -> tuple[int, ...]:
    """`vision_feature_layer`, counted from the first state."""
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


def _checked(config: VisionConfig, heads_key: str, *, rotates: bool = False) -> VisionConfig:
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
