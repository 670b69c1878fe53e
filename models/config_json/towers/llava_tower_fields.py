"""Reads the vision tower of LLaVA from a config.json; every error names the key."""

from __future__ import annotations

from ostinato.models.config.hf_fields import (
    HFConfig,
    read_flag,
    read_name,
    read_number,
    refuse_other_values,
)
from ostinato.models.config.vision_config import TowerKind, VisionConfig
from ostinato.models.config_json.torch_fields import read_activation
from ostinato.models.config_json.towers.pixtral_tower_fields import PIXTRAL, read_pixtral_vision
from ostinato.models.config_json.towers.tower_fields import (
    PLACE,
    checked_tower,
    feature_layers,
    tower_count,
    tower_fields,
    tower_integer,
)
from ostinato.models.vision.fixed_image_fields import read_feature_strategy

__all__ = ("read_llava_vision",)

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


def read_llava_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower and the projector of LLaVA 1.5 (arXiv:2310.03744) or Pixtral.

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: a key is missing, or has a value that is not supported.
    """
    fields = tower_fields(hf_config, _LLAVA_TOWER)
    supported = (*_LLAVA_KINDS, PIXTRAL)
    name = read_name(fields, PLACE + "model_type", supported, "clip_vision_model")
    if name == PIXTRAL:
        return read_pixtral_vision(hf_config, output_size)
    kind = _LLAVA_KINDS[name]
    refuse_other_values(fields, {PLACE + "num_channels": 3})
    is_clip = kind is TowerKind.clip
    num_layers = tower_count(fields, "num_hidden_layers", 12)
    strategy = read_feature_strategy(hf_config)
    image_size, patch_size = (
        tower_integer(fields, "image_size", 224),
        tower_integer(fields, "patch_size", 32 if is_clip else 16),
    )
    config = VisionConfig(
        kind=kind,
        output_size=output_size,
        hidden_size=tower_integer(fields, "hidden_size", 768),
        intermediate_size=tower_integer(fields, "intermediate_size", 3072),
        num_layers=num_layers,
        num_heads=tower_integer(fields, "num_attention_heads", 12),
        activation=read_activation(
            fields, PLACE + "hidden_act", "quick_gelu" if is_clip else "gelu_pytorch_tanh"
        ),
        norm_eps=read_number(
            fields, PLACE + "layer_norm_eps", 1e-5 if is_clip else 1e-6, at_least=0
        ),
        patch_size=patch_size,
        image_size=image_size,
        feature_layers=feature_layers(hf_config.get("vision_feature_layer", -2), num_layers),
        drops_first=strategy == "default",
        projector_activation=read_activation(hf_config, "projector_hidden_act", "gelu"),
        projector_bias=read_flag(hf_config, "multimodal_projector_bias", True),
    )
    return checked_tower(config, "num_attention_heads")
