"""Reads the vision tower of Gemma 3 from a config.json; every error names the key."""

from __future__ import annotations

from ostinato.models.config.hf_fields import (
    HFConfig,
    read_integer,
    read_number,
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

__all__ = ("read_gemma3_vision",)


def read_gemma3_vision(hf_config: HFConfig, output_size: int) -> VisionConfig:
    """The tower of Gemma 3 (arXiv:2503.19786).

    Args:
        hf_config: the parsed config.json.
        output_size: the hidden size of the decoder.

    Raises:
        ValueError: a key is missing, or has a value that is not supported.
    """
    fields = tower_fields(hf_config)
    refuse_other_values(
        fields, {PLACE + "num_channels": 3, PLACE + "model_type": "siglip_vision_model"}
    )
    image_size = tower_integer(fields, "image_size", 224)
    patch_size = tower_integer(fields, "patch_size", 16)
    config = VisionConfig(
        kind=TowerKind.gemma3,
        output_size=output_size,
        hidden_size=tower_integer(fields, "hidden_size", 768),
        intermediate_size=tower_integer(fields, "intermediate_size", 3072),
        num_layers=tower_count(fields, "num_hidden_layers", 12),
        num_heads=tower_integer(fields, "num_attention_heads", 12),
        activation=read_activation(fields, PLACE + "hidden_act", "gelu_pytorch_tanh"),
        norm_eps=read_number(fields, PLACE + "layer_norm_eps", 1e-6, at_least=0),
        patch_size=patch_size,
        image_size=image_size,
        merge_size=_square_edge(hf_config, image_size // patch_size),
    )
    return checked_tower(config, "num_attention_heads")


def _square_edge(hf_config: HFConfig, num_columns: int) -> int:
    """Patches of the edge of the square that gives one embedding."""
    num_tokens = read_integer(hf_config, "mm_tokens_per_image", default=256)
    edge = int(num_tokens**0.5)
    if edge**2 != num_tokens or num_columns % edge:
        raise ValueError(
            f"config.json: mm_tokens_per_image={num_tokens} must be the square of a number that "
            f"divides the {num_columns} patches of an image's edge"
        )
    return num_columns // edge
