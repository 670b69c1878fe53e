"""Small random models of transformers that take images, and what they compute."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.conf.schema import ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.decoder import Decoder
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.step_tensors import (
    ForwardBatch,
    GridTensors,
    LookaheadTensors,
    MediaTensors,
)
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.ops.attention import select_backend
from tests.models.driver import Driver, Sequence

TOLERANCE = 1e-4  # float32 sums in another order, over a tower and a decoder
IMAGE = 190  # the token that stands for an embedding
NUM_ROWS = 600  # embeddings that a loaded model can keep
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)

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
_PATCH = 4
_QWEN_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": _PATCH,
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


_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": _PATCH,
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
            "text_config": {**_TEXT, "model_type": "mistral", "rms_norm_eps": 0.01},
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
                "patch_size": _PATCH,
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


def reference_model(variant: ImageVariant) -> PreTrainedModel:
    """The model with random weights; vectors are random too, because 0 and 1 would hide errors."""
    torch.manual_seed(0)
    model = hf_class_of(variant)(hf_config_of(variant))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or not parameter.any():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


def spec_of(variant: ImageVariant) -> ImageSpec:
    """How pixels are scaled for the models of this module."""
    one_size = ImageSizing.tiles if variant.is_tiled else ImageSizing.fixed
    sizing = ImageSizing.shrunk if variant.is_pixtral else ImageSizing.dynamic
    return ImageSpec(
        sizing=one_size if variant.is_fixed else sizing,
        placeholder_id=IMAGE,
        placeholder="<image>",
        marked_placeholder="<image>",
        mean=MEAN,
        std=STD,
        patch_size=variant.patch_size,
        merge_size=variant.merge_size,
    )


def random_pixels(variant: ImageVariant, rows: int = 4, columns: int = 6, seed: int = 0) -> Tensor:
    """[height, width, 3] uint8; for models that take images of different sizes, the size is given
    in patches."""
    edge = variant.edge
    size = (edge, edge) if variant.is_fixed else (rows * _PATCH, columns * _PATCH)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (*size, 3), dtype=torch.uint8, generator=generator)


def hf_inputs(variant: ImageVariant, images: Listed[Tensor]) -> dict[str, Tensor]:
    """The keyword arguments of transformers for these images."""
    scaled = [
        ((image.double() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).float()
        for image in images
    ]
    if variant.is_fixed:
        stacked = torch.stack([image.permute(2, 0, 1) for image in scaled])
        # Idefics3 has the images of each prompt of a batch.
        has_batch = variant.is_tiled and variant.kind != "InternVL"
        return {"pixel_values": stacked[None] if has_batch else stacked}
    if variant.is_pixtral:  # images of a batch are padded
        sizes = torch.tensor([image.shape[:2] for image in scaled])
        height, width = sizes.max(0).values.tolist()
        padded = torch.zeros(len(scaled), 3, height, width)
        for place, image in zip(padded, scaled, strict=True):
            place[:, : image.shape[0], : image.shape[1]] = image.permute(2, 0, 1)
        return {"pixel_values": padded, "image_sizes": sizes}
    patches, grids = [], []
    for image in scaled:
        rows, columns = image.shape[0] // _PATCH, image.shape[1] // _PATCH
        squares = image.view(rows // 2, 2, _PATCH, columns // 2, 2, _PATCH, 3)
        frames = (
            squares.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1)
        )
        patches.append(frames.reshape(rows * columns, -1))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


@torch.no_grad()
def hf_features(
    variant: ImageVariant, model: PreTrainedModel, images: Listed[Tensor]
) -> list[Tensor]:
    """What the tower of transformers gives for each image: [tokens, (1 + num_deep) * D]."""
    outputs: Any = model
    outputs = outputs.model.get_image_features(**hf_inputs(variant, images), return_dict=True)
    # By layer of the decoder, then by image.
    deep = getattr(outputs, "deepstack_features", None) or []
    parts = zip(outputs.pooler_output, *deep, strict=True)
    return [torch.cat(of_image, dim=1) for of_image in parts]


def load(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    pack: bool = False,
    num_media_rows: int = NUM_ROWS,
    **settings: Any,
) -> tuple[Decoder, ModelConfig]:
    """Load a checkpoint; `settings` are those of the section `model`."""
    section = ModelSection(path=str(directory), **settings)
    checkpoint = open_checkpoint(section)
    config = read_model_config(checkpoint, section.implementation)
    device = torch.device("cpu")
    spec = config.attention_spec(Driver.block_size, dtype, device)
    model = build_model(
        config,
        dtype=dtype,
        device=device,
        attention_backend=select_backend("reference", spec),
        weights=choose_weights(section, checkpoint, pack=pack, device=device, dtype=dtype),
        num_media_rows=num_media_rows,
    )
    load_weights(model, checkpoint)
    assert isinstance(model, Decoder)
    return model, config


@torch.no_grad()
def encode(model: Decoder, pixels: Tensor, spec: ImageSpec, rows_per_unit: int = 64) -> Tensor:
    """Run a tower to its end."""
    assert model.vision is not None
    work = model.vision.encode(pixels, spec, rows_per_unit)
    while True:
        try:
            next(work)
        except StopIteration as finished:
            return finished.value


def num_units(model: Decoder, pixels: Tensor, spec: ImageSpec, rows_per_unit: int) -> int:
    """The number of units of an image."""
    assert model.vision is not None
    with torch.no_grad():
        return sum(1 for _ in model.vision.encode(pixels, spec, rows_per_unit))


class ImageSequence(Sequence):
    """A prompt with images.

    Args:
        token_ids: the prompt, with as many image tokens as the images have embeddings.
        rows: for each token the row of the media tables; 0 = none.
        places: [3, tokens] the positions of the prompt's tokens on the three axes.
    """

    def __init__(self, token_ids: list[int], rows: list[int], places: Tensor) -> None:
        super().__init__(token_ids)
        self.rows = rows
        self.places = places
        self.delta = int(places.max()) + 1 - len(token_ids)

    def row_of(self, index: int) -> int:
        return self.rows[index] if index < len(self.rows) else 0

    def end_of(self, index: int) -> int:
        """The index after the image that a token belongs to; 0 = it belongs to none."""
        if not self.row_of(index):
            return 0
        while self.row_of(index) and self.token_ids[index] == IMAGE:
            index += 1
        return index

    def place_of(self, index: int) -> list[int]:
        if index < self.places.shape[1]:
            return self.places[:, index].tolist()
        return [index + self.delta] * 3


class ImageDriver(Driver):
    """A driver of a model that takes images; the tables must be filled."""

    def batch(self, scheduled: list[tuple[Sequence, int]]) -> ForwardBatch:
        batch = super().batch(scheduled)
        rows: list[int] = []
        places: list[list[int]] = []
        ends: list[int] = []
        for sequence, count in scheduled:
            assert isinstance(sequence, ImageSequence)
            tokens = range(sequence.num_computed, sequence.num_computed + count)
            rows += [sequence.row_of(index) for index in tokens]
            ends += [sequence.end_of(index) for index in tokens]
            places += [sequence.place_of(index) for index in tokens]
        padding = len(batch.token_ids) - len(rows)
        given = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
        given["media_rows"] = torch.tensor([*rows, *[0] * padding])[:, None]
        if self.model.step_tensors is LookaheadTensors:
            ends = torch.tensor([*ends, *[0] * padding], dtype=torch.int32)
            return LookaheadTensors(**given, visible_ends=ends)
        if self.model.step_tensors is MediaTensors:
            return MediaTensors(**given)
        return GridTensors(**given, rope_positions=torch.tensor([*places, *[[0] * 3] * padding]))


def fill_tables(model: Decoder, parts: Listed[Tensor]) -> None:
    """Write the embeddings of images to the rows of the tables, from row 1 on."""
    values = torch.cat(list(parts))
    tables = model.media_tables()
    for table, part in zip(tables, values.chunk(len(tables), dim=1), strict=True):
        assert table is not None
        table[1 : 1 + len(part)] = part


def prompt_of(pieces: Listed[int | list[int]]) -> tuple[list[int], list[int]]:
    """A prompt and the media rows of its tokens.

    Args:
        pieces: lists of tokens, and for each image the number of its embeddings.
    """
    token_ids: list[int] = []
    rows: list[int] = []
    first = 1
    for piece in pieces:
        if isinstance(piece, list):
            token_ids += piece
            rows += [0] * len(piece)
        else:
            token_ids += [IMAGE] * piece
            rows += range(first, first + piece)
            first += piece
    return token_ids, rows


@torch.no_grad()
def hf_logits(
    variant: ImageVariant, model: PreTrainedModel, token_ids: list[int], images: Listed[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits [tokens, vocab_size] of transformers, and the positions [3, tokens] that it uses."""
    ids = torch.tensor([token_ids])
    given = hf_inputs(variant, images) if images else {}
    if variant.kind == "Gemma3":
        given["token_type_ids"] = (ids == IMAGE).long()
    places = torch.arange(len(token_ids)).expand(3, -1)
    if images and not (variant.is_fixed or variant.is_pixtral):
        kinds = (ids == IMAGE).int()
        given["mm_token_type_ids"] = kinds
        inner: Any = model.model
        found, _ = inner.get_rope_index(ids, kinds, image_grid_thw=given["image_grid_thw"])
        places = found[:, 0]
    return model(input_ids=ids, **given).logits[0], places
