"""The configurations of small models that take images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers

from tests.models.recurrent_variants import MROPE, RECURRENT

IMAGE = 190  # the token that stands for an embedding

_TEXT: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 7,
    "pad_token_id": None,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 191,
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
}
_GRID = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}
_WOVEN = {**_GRID, "mrope_interleaved": True}
PATCH = 4
_QWEN_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 64,
    "initializer_range": 0.15,
}
_QWEN3_TOWER = {
    **_QWEN_TOWER,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
_PATCH_OF_CLIP = 7
_CLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": _PATCH_OF_CLIP,
    "initializer_range": 0.15,
}


@dataclass(frozen=True)
class ImageVariant:
    """A class of transformers and the settings of its configuration."""

    kind: str  # the class without `ForConditionalGeneration` and `Config`
    settings: dict[str, Any]
    edge: int = 0  # pixels of the edge of every image or tile; 0 = images have different sizes
    merge_size: int = 2

    @property
    def is_fixed(self) -> bool:
        """Whether all images or tiles have one size."""
        return self.edge > 0

    @property
    def is_tiled(self) -> bool:
        """Whether images are cut into tiles."""
        return self.kind in ("InternVL", "Idefics3", "SmolVLM")

    @property
    def is_pixtral(self) -> bool:
        """Whether the tower is that of Pixtral or Mistral 3."""
        return self.settings["vision_config"].get("model_type") == "pixtral"

    @property
    def patch_size(self) -> int:
        """Pixels of a patch's edge."""
        return self.settings["vision_config"]["patch_size"]


def _llava(tower: str, text: dict[str, Any], **settings: Any) -> ImageVariant:
    vision = {**_CLIP, "model_type": tower}
    return ImageVariant(
        "Llava",
        {"vision_config": vision, "text_config": text, "image_token_index": IMAGE, **settings},
        edge=_CLIP["image_size"],
        merge_size=1,
    )


def _internvl(vision: dict[str, Any], text: str, merge_size: int, **settings: Any) -> ImageVariant:
    return ImageVariant(
        "InternVL",
        {
            "vision_config": {**_CLIP, **vision},
            "text_config": {**_TEXT, "model_type": text},
            "image_token_id": IMAGE,
            "image_seq_length": (_CLIP["image_size"] // _PATCH_OF_CLIP // merge_size) ** 2,
            "downsample_ratio": 1 / merge_size,
            **settings,
        },
        edge=_CLIP["image_size"],
        merge_size=merge_size,
    )


def _idefics(kind: str, edge: int, **settings: Any) -> ImageVariant:
    """`edge` is that of tiles. The table of positions has 4 x 4 places."""
    return ImageVariant(
        kind,
        {
            "vision_config": {**_CLIP, "image_size": 30},
            "text_config": {**_TEXT, "model_type": "llama"},
            "image_token_id": IMAGE,
            "pad_token_id": 0,
            **settings,
        },
        edge=edge,
        merge_size=settings.get("scale_factor", 2),
    )


def _qwen3_5(decoder: str) -> dict[str, Any]:
    """`decoder` is the variant of the decoder for texts alone."""
    tower = {key: value for key, value in _QWEN3_TOWER.items() if key != "deepstack_visual_indexes"}
    text = {**RECURRENT[decoder].settings, "rope_parameters": MROPE, "rms_norm_eps": 0.05}
    return {"text_config": text, "vision_config": tower, **_TOKENS}


_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": PATCH,
    "initializer_range": 0.15,
}
VARIANTS = {
    "llava": _llava("clip_vision_model", {**_TEXT, "model_type": "llama"}),
    "llava-mistral": _llava(
        "clip_vision_model",
        {**_TEXT, "model_type": "mistral", "sliding_window": 9},
        vision_feature_layer=[-1, 0, 2],
        multimodal_projector_bias=False,
    ),
    "llava-siglip": _llava(
        "siglip_vision_model",
        {**_TEXT, "model_type": "qwen2", "tie_word_embeddings": True},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        projector_hidden_act="relu",
    ),
    "gemma3": ImageVariant(
        "Gemma3",
        {
            "text_config": {
                **_TEXT,
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {**_CLIP, "model_type": "siglip_vision_model"},
            "image_token_index": IMAGE,
            "boi_token_index": 192,
            "eoi_token_index": 193,
            "mm_tokens_per_image": 4,
        },
        edge=_CLIP["image_size"],
        merge_size=1,
    ),
    "pixtral": ImageVariant(
        "Llava",
        {
            "text_config": {
                **_TEXT,
                "model_type": "mistral",
                "head_dim": 24,
                "sliding_window": None,
            },
            "vision_config": {**_PIXTRAL, "hidden_act": "silu"},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "image_token_index": IMAGE,
        },
        merge_size=1,
    ),
    "mistral3": ImageVariant(
        "Mistral3",
        {
            "text_config": {**_TEXT, "model_type": "mistral", "rms_norm_eps": 0.05},
            "vision_config": {
                **_PIXTRAL,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 70.0},
            },
            "vision_feature_layer": -2,
            "image_token_index": IMAGE,
        },
    ),
    "internvl": _internvl({"attention_bias": True}, "qwen2", 2, tie_word_embeddings=False),
    "internvl-qwen3": _internvl(
        {
            "use_qk_norm": True,
            "norm_type": "rms_norm",
            "use_mean_pooling": False,
            "use_mask_token": True,
        },
        "qwen3",
        4,
        projector_hidden_act="relu",
    ),
    "internvl-llama": _internvl(
        {"use_absolute_position_embeddings": False, "use_mean_pooling": False},
        "llama",
        1,
        projector_hidden_act="silu",
        vision_feature_layer=-2,
    ),
    "idefics3": _idefics("Idefics3", 30),
    "smolvlm": _idefics("SmolVLM", 65, scale_factor=3, tie_word_embeddings=True),
    "qwen2-vl": ImageVariant(
        "Qwen2VL",
        {
            "text_config": {**_TEXT, "rope_parameters": _GRID},
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": PATCH,
                "initializer_range": 0.15,
            },
            **_TOKENS,
        },
    ),
    "qwen2.5-vl": ImageVariant(
        "Qwen2_5_VL",
        {
            "text_config": {**_TEXT, "rope_parameters": _GRID},
            "vision_config": {**_QWEN_TOWER, "window_size": 24, "fullatt_block_indexes": [1]},
            "tie_word_embeddings": True,
            **_TOKENS,
        },
    ),
    "qwen3-vl": ImageVariant(
        "Qwen3VL",
        {
            "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": _WOVEN},
            "vision_config": _QWEN3_TOWER,
            **_TOKENS,
        },
    ),
    "qwen3-vl-moe": ImageVariant(
        "Qwen3VLMoe",
        {
            "text_config": {
                **_TEXT,
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "rope_parameters": _WOVEN,
            },
            "vision_config": _QWEN3_TOWER,
            **_TOKENS,
        },
    ),
    "qwen3.5": ImageVariant("Qwen3_5", _qwen3_5("qwen3.5")),
    "qwen3.5-moe": ImageVariant("Qwen3_5Moe", _qwen3_5("qwen3.5-moe")),
}

_GROWING = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "max_position_embeddings": 640,
    "original_max_position_embeddings": 20, "llama_4_scaling_beta": 0.6,
}  # fmt: skip
# Another decoder. Few tests need it.
MINISTRAL3 = ImageVariant(
    "Mistral3",
    {
        **VARIANTS["mistral3"].settings,
        "text_config": {**_TEXT, "model_type": "ministral3", "rope_parameters": _GROWING},
        "tie_word_embeddings": False,
    },
)


def hf_config_of(variant: ImageVariant) -> Any:
    """The configuration object of transformers."""
    return getattr(transformers, f"{variant.kind}Config")(**variant.settings)


def hf_class_of(variant: ImageVariant) -> Any:
    return getattr(transformers, f"{variant.kind}ForConditionalGeneration")
