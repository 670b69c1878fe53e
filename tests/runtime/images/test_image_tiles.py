"""Images that are cut into tiles have the grids and the texts of transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.models.vision.image_fields import read_image_spec
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.tile_spec import TileGrid, TileSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_inputs import check_detail, prepare_image_source
from ostinato.runtime.images.image_sources import ImageSource
from ostinato.runtime.images.image_tiles import text_of_tiles, tile_grid
from ostinato.runtime.images.prepare_image import prepare_pil
from ostinato.runtime.media.placeholders import expand_placeholders
from ostinato.runtime.media.prompt_media import PreparedMedium
from tests.runtime.images.image_processors import LIMITS, PROCESSORS, picture

AROUND = "<fake_token_around_image>"
edges = st.integers(1, 5000)


def nearest(least: int, most: int, edge: int = 448) -> TileSpec:
    return TileSpec(
        grid=TileGrid.nearest, edge=edge, min_tiles=least, max_tiles=most, start="<img>",
        end="</img>",
    )  # fmt: skip


def longest(longest_edge: int, edge: int) -> TileSpec:
    return TileSpec(
        grid=TileGrid.longest, edge=edge, longest_edge=longest_edge, start=AROUND, end=AROUND,
        whole_name="<global-img>",
    )  # fmt: skip


@given(edges, edges, st.integers(1, 4), st.integers(0, 36), st.sampled_from([28, 448]))
@example(448, 896, 1, 11, 448)  # two grids have the same ratio
@settings(deadline=None)
def test_the_grid_of_internvl(height: int, width: int, least: int, more: int, edge: int) -> None:
    spec = nearest(least, least + more, edge)
    rows, columns = tile_grid(height, width, spec)
    assert rows * columns <= spec.max_grid
    if spec.max_tiles > 1:
        expected = get_optimal_tiled_canvas((height, width), (edge, edge), least, spec.max_tiles)
        assert (columns, rows) == expected


class _Sizes(Idefics3ImageProcessorPil):
    """Resizes no pixels, so that large sizes take no time."""

    def resize(self, image: Any, size: SizeDict, *_: Any, **__: Any) -> Any:
        shape = size.height, size.width
        if size.longest_edge:
            shape = get_resize_output_image_size(image, size.longest_edge)
        return np.broadcast_to(np.uint8(0), (3, *(int(length or 0) for length in shape)))


@given(edges, edges, st.integers(1, 4500), st.integers(20, 600))
@example(5000, 5000, 729, 364)  # the other edge is rounded up to an even number
@example(729, 729, 729, 729)
@settings(deadline=None)
def test_the_grid_of_idefics3(height: int, width: int, longest_edge: int, edge: int) -> None:
    spec, sizes = longest(longest_edge, edge), _Sizes()
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    image = sizes.resize(image, SizeDict(longest_edge=longest_edge))
    image = sizes.resize_for_vision_encoder(image, edge)
    frames, rows, columns = sizes.split_images(image, {"longest_edge": edge})
    found = tile_grid(height, width, spec)
    assert found == ((rows, columns) if rows else (1, 1))
    assert len(frames) <= spec.max_parts
    assert found[0] * found[1] <= spec.max_grid


def test_the_largest_images() -> None:
    assert (nearest(1, 12).max_grid, nearest(1, 12).max_parts) == (12, 13)
    assert (nearest(1, 1).max_grid, nearest(1, 1).max_parts) == (1, 1)
    assert longest(4 * 364, 364).max_parts == 17
    assert longest(364, 364).max_parts == 1
    assert longest(365, 364).max_parts == longest(366, 364).max_parts == 5
    assert longest(10_000, 512).max_parts == 65
    assert msgspec.structs.replace(longest(2048, 512), is_split=False).max_parts == 1


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 2), (3, 2), (12, 1)])
def test_the_text_of_smolvlm(rows: int, columns: int) -> None:
    """transformers gives 0 rows to an image of one tile."""
    sizes = (rows, columns) if rows * columns > 1 else (0, 0)
    expected = get_image_prompt_string(*sizes, 1, AROUND, "<image>", "<global-img>")
    assert text_of_tiles(rows, columns, longest(9, 9), "<image>") == expected


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """It merges newlines."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    own.train_from_iterator(["a\n\nb\n\n a row of words\n\n"] * 4, trainer)
    names = ["<image>", AROUND, "<global-img>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    names += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3)]
    own.add_special_tokens([AddedToken(name, special=True) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )


class _WithoutVideos(InternVLProcessor):
    """A processor whose video processor, which needs torchvision, is None."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


@cache
def processor_named(name: str) -> Any:
    (length,) = PROCESSORS[name].whole.values()
    made = PROCESSORS[name].make()
    if name.startswith("internvl"):
        return _WithoutVideos(made, tokenizer(), image_seq_length=length)
    return Idefics3Processor(made, tokenizer(), image_seq_len=length)


def spec_named(name: str, directory: Path, **options: Any) -> ImageSpec:
    """The spec, with the placeholder of `tokenizer`."""
    placeholder = "<IMG_CONTEXT>" if name.startswith("internvl") else "<image>"
    token_id = tokenizer().convert_tokens_to_ids(placeholder)
    config = {**PROCESSORS[name].config, "image_token_id": token_id}
    return read_image_spec(
        PROCESSORS[name].save(directory),
        config,
        token_text=lambda _: placeholder,
        token_id={}.get,
        **options,
    )


TILED = [name for name in PROCESSORS if name.startswith(("internvl", "idefics3", "smolvlm"))]
PROMPTS = ["{}", "a {}b", "{}\n\n{}", "a\n{} row\n\n{}b{}"]


@pytest.mark.parametrize("name", TILED)
def test_prompts_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    spec, processor = spec_named(name, tmp_path), processor_named(name)
    encode: Any = lambda text: tokenizer().encode(text, add_special_tokens=False)  # noqa: E731
    sizes = [(60, 45), (20, 90), (50, 50)]
    for prompt in PROMPTS:
        text = prompt.replace("{}", spec.placeholder)
        images = [picture(*size) for size in sizes[: prompt.count("{}")]]
        expected = processor(images=images, text=text)["input_ids"][0]
        media = [
            PreparedMedium(one.parts, text=one.text)
            for one in (prepare_pil(image, spec, LIMITS, "image") for image in images)
        ]
        found, placed = expand_placeholders(encode(text), media, spec, encode, param="prompt")
        assert found == expected
        assert sum(part.num_tokens for part in placed) == found.count(spec.placeholder_id)


@pytest.mark.parametrize("name", TILED)
def test_small_images_are_one_tile(name: str, tmp_path: Path) -> None:
    """As the processor with the option that turns tiles off."""
    spec, image = spec_named(name, tmp_path), picture(60, 45)
    source = ImageSource(pil=image, is_small=True)
    check_detail(source, spec, "image")
    prepared = prepare_image_source(source, spec, ImagesConfig(), "image", {})
    option = "crop_to_patches" if name.startswith("internvl") else "do_image_splitting"
    processor = PROCESSORS[name].make()
    reference = processor(
        image, return_tensors="np", do_rescale=False, do_normalize=False, **{option: False}
    )
    (part,) = prepared.parts
    pixels = np.frombuffer(part.pixels, np.uint8).reshape(part.shape)
    expected = np.asarray(reference["pixel_values"])
    assert np.array_equal(pixels, np.moveaxis(expected.reshape(expected.shape[-3:]), 0, -1))
    assert prepared.text.count(spec.placeholder) == 1


def test_tiles_above_the_size_of_small_images_are_refused(tmp_path: Path) -> None:
    spec = spec_named("internvl", tmp_path)
    assert spec.tiles is not None
    large = msgspec.structs.replace(spec.tiles, edge=513)
    with pytest.raises(InvalidRequestError, match="have at least 263169; leave detail out"):
        check_detail(ImageSource(is_small=True), msgspec.structs.replace(spec, tiles=large), "a")


def test_a_setting_lowers_the_number_of_tiles(tmp_path: Path) -> None:
    tile = 28 * 28
    for pixels, most in ((10 * tile, 5), (5 * tile - 1, 4), (2 * tile, 2), (tile, 1)):
        spec = spec_named("internvl", tmp_path, max_resized_pixels=pixels)
        assert spec.tiles is not None
        assert spec.tiles.max_tiles == most
        assert spec.max_tokens == 4 * (most + 1 if most > 1 else 1)
        assert spec.max_encoded_tokens == 4
    with pytest.raises(ValueError, match=r"max_resized_pixels=783 must be at least 784, because a"):
        spec_named("internvl", tmp_path, max_resized_pixels=783)
    with pytest.raises(ValueError, match=r"must be at least 2352, because 3 tiles have so many"):
        spec_named("internvl-many", tmp_path, max_resized_pixels=3 * tile - 1)
    for pixels, most in ((16 * tile, 85), (16 * tile - 1, 84), (4 * tile, 56), (tile, 28)):
        spec = spec_named("idefics3", tmp_path, max_resized_pixels=pixels)
        assert spec.tiles is not None
        assert spec.tiles.longest_edge == most
        assert spec.tiles.max_grid * tile <= pixels


def test_the_published_files(tmp_path: Path) -> None:
    """Those of InternVL3 and of SmolVLM 256M."""
    path = tmp_path / "preprocessor_config.json"
    fields: dict[str, Any] = {
        "crop_to_patches": False, "do_resize": True, "image_mean": [0.485, 0.456, 0.406],
        "image_processor_type": "GotOcr2ImageProcessorFast", "image_std": [0.229, 0.224, 0.225],
        "max_patches": 12, "min_patches": 1, "processor_class": "InternVLProcessor", "resample": 3,
        "rescale_factor": 1 / 255, "size": {"height": 448, "width": 448},
    }  # fmt: skip
    path.write_text(json.dumps(fields))
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_seq_length": 256, "processor_class": "InternVLProcessor"})
    )
    config: dict[str, Any] = {
        "model_type": "internvl",
        "image_token_id": 151667,
        "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
    }
    spec = read_image_spec(tmp_path, config, token_text=str, token_id={}.get)
    assert (spec.num_tokens, spec.max_tokens, spec.fixed_size) == (256, 13 * 256, (448, 448))
    fields = {
        "do_image_splitting": True, "do_pad": True, "image_mean": [0.5] * 3,
        "image_processor_type": "Idefics3ImageProcessor", "image_std": [0.5] * 3,
        "max_image_size": {"longest_edge": 512}, "processor_class": "Idefics3Processor",
        "resample": 1, "rescale_factor": 1 / 255, "size": {"longest_edge": 2048},
    }  # fmt: skip
    path.write_text(json.dumps(fields))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_len": 64}))
    config = {
        "model_type": "idefics3",
        "image_token_id": 49190,
        "scale_factor": 4,
        "vision_config": {"image_size": 512, "patch_size": 16},
    }
    spec = read_image_spec(tmp_path, config, token_text=str, token_id={}.get)
    assert (spec.num_tokens, spec.max_tokens, spec.fixed_size) == (64, 17 * 64, (512, 512))
