"""Prompts with images of Pixtral and Mistral 3 against the processor of transformers."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.pixtral import image_processing_pil_pixtral

from ostinato.models.vision.image_fields import read_image_spec
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.images.prepare_image import ImageLimits, prepare_pil
from ostinato.runtime.media.placeholders import expand_placeholders
from ostinato.runtime.media.prompt_media import PreparedMedium
from ostinato.runtime.types.images import PreparedImages
from tests.runtime.images.image_processors import (
    LIMITS,
    PROCESSORS,
    TOKEN_IDS,
    picture,
    pixels_of,
    read_spec,
)

PIXTRAL, MISTRAL3 = PROCESSORS["pixtral"], PROCESSORS["mistral3"]
ADDED = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
FILE = "processor_config.json"
LARGE = ImageLimits(max_bytes=0, max_pixels=1 << 21)


@pytest.fixture(scope="module")
def processor_class() -> Any:
    """The processor. Its module imports one that needs torchvision, for a function of Pillow's."""
    unneeded = "transformers.models.pixtral.image_processing_pixtral"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, unneeded, image_processing_pil_pixtral)
        module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    return module.PixtralProcessor


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(10)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ADDED])
    return tokenizer


@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
def test_prompts_and_pixels_are_those_of_the_processor(
    name: str, processor_class: Any, tmp_path: Path
):
    """The processor is saved by transformers, with all its keys in one file."""
    case, tokenizer = PROCESSORS[name], make_tokenizer()
    reference = processor_class(
        case.make(), PreTrainedTokenizerFast(tokenizer_object=tokenizer), **case.whole
    )
    reference.save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    spec = read_image_spec(
        tmp_path,
        {**case.config, "image_token_index": tokenizer.token_to_id("[IMG]")},
        token_text=lambda token: tokenizer.id_to_token(token) or "",
        token_id=tokenizer.token_to_id,
    )

    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.tuples(st.integers(2, 130), st.integers(2, 130)), min_size=1, max_size=3))
    def check(sizes: list[tuple[int, int]]):
        images = [picture(*size, seed=number) for number, size in enumerate(sizes)]
        text = "w1 " + " w2 [IMG] w3".join([""] * (len(images) + 1))
        expected = reference(text=text, images=images, return_tensors="np")
        prepared = [prepare_pil(image, spec, LIMITS, "image") for image in images]
        token_ids, placed = expand_placeholders(
            tokenizer.encode(text).ids,
            [PreparedMedium(one.parts) for one in prepared],
            spec,
            lambda text: [],
            param="prompt",
        )
        assert token_ids == expected["input_ids"][0].tolist()
        assert [[one.height, one.width] for one in placed] == expected["image_sizes"].tolist()
        for one, colours in zip(placed, expected["pixel_values"], strict=True):
            pixels = (
                pixels_of(PreparedImages((one,))) * np.float64(spec.rescale) - spec.mean
            ) / spec.std
            shown = np.moveaxis(colours, 0, -1)[: one.height, : one.width]
            np.testing.assert_allclose(pixels, shown, rtol=1e-5, atol=1e-5)
            tokens = token_ids[one.begin : one.end]
            assert tokens.count(spec.placeholder_id) == one.num_rows
            assert len(tokens) == one.num_tokens

    check()


def read(directory: Path, **changes: Any) -> ImageSpec:
    """The spec of a Mistral 3 whose processor_config.json has other keys. None removes a key."""
    MISTRAL3.save(directory)
    fields = {**MISTRAL3.whole, **changes}
    stated = {key: value for key, value in fields.items() if value is not None}
    (directory / FILE).write_text(json.dumps(stated))
    return read_spec(directory, MISTRAL3.config)


def test_the_tokens_are_those_that_the_file_names(tmp_path: Path):
    spec = read(tmp_path)
    assert (spec.patch_size, spec.merge_size, spec.unit) == (7, 2, 14)
    assert (spec.max_edges, spec.max_tokens) == ((70, 90), 5 * 7)
    assert (spec.placeholder_id, spec.placeholder) == (10, "[IMG]")
    assert spec.row_ends == (TOKEN_IDS["[IMG_BREAK]"], TOKEN_IDS["[IMG_END]"])
    assert spec.video is None
    others = {"image_break_token": "[IMG_END]", "image_end_token": "[IMG]"}
    assert read(tmp_path, **others).row_ends == (TOKEN_IDS["[IMG_END]"], TOKEN_IDS["[IMG]"])
    same = {"image_token": "[IMG]", "processor_class": "PixtralProcessor", "chat_template": "x"}
    assert read(tmp_path, **same) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": None}, "patch_size=16 .*config.json: vision_config.patch_size=7"),
        ({"patch_size": "7"}, 'patch_size="7" .*an integer of at least 1'),
        ({"spatial_merge_size": None}, "spatial_merge_size=1 .*config.json: spatial_merge_size=2"),
        ({"image_token": "[IMG_END]"}, r'image_token="\[IMG_END\]" .*image_token_index'),
        ({"image_break_token": "[X]"}, r'image_break_token="\[X\]" .*an added token'),
        ({"image_end_token": 13}, "image_end_token=13 .*an added token"),
        ({"tiles": 4}, "tiles=4 is not supported; remove the key"),
    ],
)
def test_what_the_file_may_not_have_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=f"^{FILE}: {message}"):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize=false .*it must be true"),
        ({"do_center_crop": True}, "do_center_crop=true .*it must be false"),
        ({"size": {"shortest_edge": 28}}, "size=.*longest_edge, or height and width"),
        ({"size": {"longest_edge": 0}}, "size=.*an integer of at least 1"),
        ({"size": 28, "default_to_square": False}, "size=28 .*longest_edge"),
        ({"image_processor_type": "CLIPImageProcessor"}, "supported: PixtralImageProcessor"),
    ],
)
def test_images_that_are_prepared_in_another_way_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
):
    path = PIXTRAL.save(tmp_path) / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=f"^preprocessor_config.json: .*{message}"):
        read_spec(tmp_path, PIXTRAL.config)


def test_the_limit_of_pixels_is_that_of_a_square(tmp_path: Path):
    PIXTRAL.save(tmp_path)
    as_stated = read_spec(tmp_path, PIXTRAL.config)
    assert as_stated.max_edges == (80, 80)
    # 3000 pixels have room for 3 x 3 squares of 16 pixels.
    lowered = read_spec(tmp_path, PIXTRAL.config, max_resized_pixels=3000)
    assert (lowered.max_edges, lowered.max_tokens) == ((48, 48), 9)
    assert read_spec(tmp_path, PIXTRAL.config, max_resized_pixels=6400) == as_stated
    with pytest.raises(ValueError, match=r"=255 must be at least 256, .*squares of 16x16"):
        read_spec(tmp_path, PIXTRAL.config, max_resized_pixels=255)


def test_the_files_of_pixtral_12b_and_mistral_small(tmp_path: Path):
    fields = {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "processor_class": "PixtralProcessor",
        "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 3,
        "image_processor_type": "PixtralImageProcessor", "rescale_factor": 0.00392156862745098,
    }  # fmt: skip
    tokens = {
        "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]",
        "processor_class": "PixtralProcessor",
    }  # fmt: skip
    for name, edge, patch_size, merge_size, config in (
        (
            "llava", 1024, 16, 1,
            {"vision_config": {"model_type": "pixtral"}, "image_token_index": 10},
        ),
        ("mistral3", 1540, 14, 2, {"vision_config": {"patch_size": 14}}),
    ):  # fmt: skip
        patch = {"height": patch_size, "width": patch_size}
        sizes = {"patch_size": patch, "size": {"longest_edge": edge}}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields | sizes))
        whole = tokens | {"patch_size": patch_size}
        if merge_size > 1:
            whole["spatial_merge_size"] = merge_size
        (tmp_path / FILE).write_text(json.dumps(whole))
        spec = read_spec(tmp_path, {"model_type": name, **config})
        assert (spec.unit, spec.max_edges) == (patch_size * merge_size, (edge, edge))
        (image,) = prepare_pil(Image.new("RGB", (2000, 700)), spec, LARGE, "image").parts
        # The longest edge becomes that of the file. The other one is rounded up.
        rows = -(-int(700 / (2000 / edge)) // spec.unit)
        assert image.num_tokens == rows * (edge // spec.unit + 1)
        assert image.num_rows == rows * edge // spec.unit
