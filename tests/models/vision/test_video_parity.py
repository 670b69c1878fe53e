"""Towers on the pairs of a video, one by one, against transformers on the whole video."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from ostinato.models.decoder import Decoder
from tests.models.vision.image_models import (
    TOLERANCE,
    encode,
    load,
    num_units,
    random_pixels,
    reference_model,
    spec_of,
)
from tests.models.vision.image_variants import VARIANTS, ImageVariant
from tests.models.vision.video_models import hf_video_features, random_video

WITH_VIDEOS = [name for name, each in VARIANTS.items() if each.kind.startswith("Qwen")]


class Pair(NamedTuple):
    """A model of transformers and this project's model with the same weights."""

    variant: ImageVariant
    reference: PreTrainedModel
    own: Decoder


@pytest.fixture(scope="module", params=WITH_VIDEOS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant = VARIANTS[request.param]
    directory = tmp_path_factory.mktemp("model")
    reference = reference_model(variant)
    reference.save_pretrained(directory)
    return Pair(variant, reference, load(directory)[0])


# Pairs, rows and columns of patches. The windows of Qwen2.5-VL have 6 patches on each side here.
SIZES = [(3, 4, 6), (1, 2, 2), (4, 2, 30), (2, 14, 4), (2, 12, 18), (5, 8, 8)]


def test_pairs_have_the_embeddings_of_the_whole_video(models: Pair) -> None:
    spec = spec_of(models.variant)
    videos = [random_video(models.variant, *size, seed=place) for place, size in enumerate(SIZES)]
    expected = hf_video_features(models.variant, models.reference, videos)
    for video, features in zip(videos, expected, strict=True):
        found = torch.cat([encode(models.own, pair, spec) for pair in video])
        torch.testing.assert_close(found, features, atol=TOLERANCE, rtol=0)


def test_both_frames_count(models: Pair) -> None:
    spec = spec_of(models.variant)
    (pair,) = random_video(models.variant, 1)
    turned = pair.flip(0)
    assert not torch.allclose(
        encode(models.own, pair, spec), encode(models.own, turned, spec), atol=0.01
    )


def test_a_pair_of_equal_frames_is_an_image(models: Pair) -> None:
    spec = spec_of(models.variant)
    image = random_pixels(models.variant, 6, 8)
    found = encode(models.own, torch.stack((image, image)), spec)
    assert torch.equal(found, encode(models.own, image, spec))


def test_a_pair_has_as_many_units_as_an_image(models: Pair) -> None:
    spec = spec_of(models.variant)
    (pair,) = random_video(models.variant, 1, 6, 10)
    counts = [num_units(models.own, pixels, spec, 12) for pixels in (pair, pair[0])]
    assert counts[0] == counts[1] > 1


def test_packed_and_rounded_matrices(models: Pair, tmp_path: Path) -> None:
    models.reference.save_pretrained(tmp_path)
    spec = spec_of(models.variant)
    (pair,) = random_video(models.variant, 1, 6, 10)
    expected = encode(models.own, pair, spec)
    packed, _ = load(tmp_path, pack=True)
    torch.testing.assert_close(encode(packed, pair, spec), expected, atol=TOLERANCE, rtol=0)
    rounded, _ = load(tmp_path, torch.bfloat16)
    found = encode(rounded, pair, spec)
    assert found.dtype is torch.bfloat16
    assert (found.float() - expected).norm() < 0.03 * expected.norm()
