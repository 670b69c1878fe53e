"""Small random models of transformers that take images, and what they compute."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from pathlib import Path
from typing import Any

import torch
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
from tests.models.vision.image_variants import IMAGE, PATCH, ImageVariant, hf_class_of, hf_config_of

TOLERANCE = 1e-4  # float32 sums in another order, over a tower and a decoder
NUM_ROWS = 600  # embeddings that a loaded model can keep
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


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
    size = (edge, edge) if variant.is_fixed else (rows * PATCH, columns * PATCH)
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
        rows, columns = image.shape[0] // PATCH, image.shape[1] // PATCH
        squares = image.view(rows // 2, 2, PATCH, columns // 2, 2, PATCH, 3)
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
            given["visible_ends"] = torch.tensor([*ends, *[0] * padding], dtype=torch.int32)
            return LookaheadTensors(**given)
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
