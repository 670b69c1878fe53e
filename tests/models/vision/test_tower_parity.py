"""Vision towers against transformers on the same weights and pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ostinato.models.decoder import Decoder
from tests.models.vision.image_models import (
    TOLERANCE,
    encode,
    hf_features,
    load,
    num_units,
    random_pixels,
    reference_model,
    spec_of,
)
from tests.models.vision.image_variants import VARIANTS, ImageVariant


@dataclass(frozen=True)
class Pair:
    """A model of transformers and this project's model with the same weights."""

    variant: ImageVariant
    reference: PreTrainedModel
    own: Decoder


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant = VARIANTS[request.param]
    directory = tmp_path_factory.mktemp("model")
    reference = reference_model(variant)
    reference.save_pretrained(directory)
    return Pair(variant, reference, load(directory)[0])


# Rows and columns of patches. The windows of Qwen2.5-VL have 6 patches on each side here.
SIZES = [(4, 6), (2, 2), (2, 30), (14, 4), (6, 6), (12, 18), (8, 8), (16, 10)]


def test_embeddings_are_those_of_transformers(pair: Pair) -> None:
    sizes = SIZES[:1] if pair.variant.is_fixed else SIZES
    for rows, columns in sizes:
        if pair.variant.kind == "Mistral3" and (rows, columns) == (2, 2):
            continue  # transformers 5.24 fails for images with one embedding
        pixels = random_pixels(pair.variant, rows, columns, seed=rows)
        (expected,) = hf_features(pair.variant, pair.reference, [pixels])
        found = encode(pair.own, pixels, spec_of(pair.variant))
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_layers_of_another_order_are_merged_for_the_decoder_in_order(tmp_path: Path) -> None:
    """`deepstack_visual_indexes` names the layer of each merger. The results are by layer."""
    variant = VARIANTS["qwen3-vl"]
    tower = {**variant.settings["vision_config"], "deepstack_visual_indexes": [2, 0]}
    variant = ImageVariant(variant.kind, {**variant.settings, "vision_config": tower})
    reference = reference_model(variant)
    reference.save_pretrained(tmp_path)
    pixels = random_pixels(variant)
    (expected,) = hf_features(variant, reference, [pixels])
    found = encode(load(tmp_path)[0], pixels, spec_of(variant))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("rows_per_unit", [1, 7, 40, 10_000])
def test_results_do_not_depend_on_the_size_of_units(pair: Pair, rows_per_unit: int) -> None:
    # Not bitwise: the kernels of attention, and those of matrices that are not packed, add in an
    # order that depends on the number of rows.
    pixels, spec = random_pixels(pair.variant, 8, 14), spec_of(pair.variant)
    whole = encode(pair.own, pixels, spec, 64)
    found = encode(pair.own, pixels, spec, rows_per_unit)
    torch.testing.assert_close(found, whole, atol=3e-6 * float(whole.abs().max()), rtol=0)


def test_the_number_of_units_depends_on_the_size_of_the_image_alone(pair: Pair) -> None:
    spec = spec_of(pair.variant)
    images = [random_pixels(pair.variant, 6, 10, seed) for seed in (1, 2)]
    counts = {num_units(pair.own, image, spec, 12) for image in images}
    assert len(counts) == 1
    assert counts.pop() > num_units(pair.own, images[0], spec, 1000)


def test_packed_matrices_give_the_same(pair: Pair, tmp_path: Path) -> None:
    pair.reference.save_pretrained(tmp_path)
    packed, _ = load(tmp_path, pack=True)
    pixels, spec = random_pixels(pair.variant, 6, 10), spec_of(pair.variant)
    expected = encode(pair.own, pixels, spec)
    torch.testing.assert_close(encode(packed, pixels, spec), expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_is_near_float32(pair: Pair, tmp_path: Path) -> None:
    pair.reference.save_pretrained(tmp_path)
    rounded, _ = load(tmp_path, torch.bfloat16)
    pixels, spec = random_pixels(pair.variant, 6, 10), spec_of(pair.variant)
    expected, found = encode(pair.own, pixels, spec), encode(rounded, pixels, spec)
    assert found.dtype is torch.bfloat16
    assert (found.float() - expected).norm() < 0.03 * expected.norm()


def test_an_image_of_another_size_is_refused(tmp_path: Path) -> None:
    variant = VARIANTS["llava"]
    reference_model(variant).save_pretrained(tmp_path)
    pixels = torch.zeros(21, 28, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"shape \[21, 28, 3\].*takes images of \[28, 28, 3\]"):
        encode(load(tmp_path)[0], pixels, spec_of(variant))
