"""Whole models against transformers on the same weights, prompts and pixels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.decoder import Decoder
from ostinato.models.step_tensors import LookaheadTensors
from tests.models.vision.image_models import (
    TOLERANCE,
    ImageDriver,
    ImageSequence,
    encode,
    fill_tables,
    hf_logits,
    load,
    prompt_of,
    random_pixels,
    reference_model,
    spec_of,
)
from tests.models.vision.image_variants import MINISTRAL3, VARIANTS, ImageVariant

TEXT = [(7 * index * index + 13 * index + 5) % 189 for index in range(30)]


@dataclass(frozen=True)
class Pair:
    """A model of transformers and this project's model with the same weights."""

    variant: ImageVariant
    reference: PreTrainedModel
    own: Decoder
    config: ModelConfig

    def prepare(self, before: int, between: int, num_images: int) -> tuple[ImageSequence, Tensor]:
        """A prompt whose images are in the tables, and its logits in transformers.

        Args:
            before: tokens before the first image.
            between: tokens after each image but the last; the last has 6.
            num_images: images of the prompt, each of another size.
        """
        sizes = [(4, 6), (2, 10), (6, 2)][:num_images]
        images = [random_pixels(self.variant, *size, seed=size[0]) for size in sizes]
        parts = [encode(self.own, image, spec_of(self.variant)) for image in images]
        pieces: list[int | list[int]] = [TEXT[:before]]
        for part in parts:
            pieces += [len(part), TEXT[before : before + between]]
        pieces[-1] = TEXT[-6:]
        token_ids, rows = prompt_of(pieces)
        if parts:
            fill_tables(self.own, parts)
        logits, places = hf_logits(self.variant, self.reference, token_ids, images)
        return ImageSequence(token_ids, rows, places), logits

    def cut(self, sequence: ImageSequence, index: int) -> int:
        """An index at which a chunk may end: the given one, or the end of the image there."""
        if index and self.own.step_tensors is LookaheadTensors and sequence.end_of(index - 1):
            return sequence.end_of(index - 1)
        return index

    def driver(self) -> ImageDriver:
        return ImageDriver(self.own, self.config, max_len=640)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant = VARIANTS[request.param]
    directory = tmp_path_factory.mktemp("model")
    reference = reference_model(variant)
    reference.save_pretrained(directory)
    return Pair(variant, reference, *load(directory))


def test_the_queries_of_ministral3_grow(tmp_path: Path) -> None:
    reference = reference_model(MINISTRAL3)
    reference.save_pretrained(tmp_path)
    pair = Pair(MINISTRAL3, reference, *load(tmp_path))
    sequence, expected = pair.prepare(12, 12, 3)
    assert len(sequence.token_ids) > 2 * 20  # they have grown twice
    logits = pair.driver().prefill(sequence, [7, len(sequence.token_ids) - 7])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("before", "between", "num_images"),
    [(5, 0, 1), (0, 0, 1), (3, 4, 2), (0, 1, 3)],
    ids=["text before", "image first", "two images", "three images"],
)
def test_logits_are_those_of_transformers(
    pair: Pair, before: int, between: int, num_images: int
) -> None:
    sequence, expected = pair.prepare(before, between, num_images)
    logits = pair.driver().prefill(sequence, [len(sequence.token_ids)])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_chunks_may_divide_an_image(pair: Pair) -> None:
    sequence, expected = pair.prepare(3, 4, 2)
    cuts = [pair.cut(sequence, index) for index in (0, 5, 8, 9, len(sequence.token_ids))]
    logits = pair.driver().prefill(sequence, [end - begin for begin, end in pairwise(cuts)])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_text_without_images(pair: Pair) -> None:
    sequence, expected = pair.prepare(20, 0, 0)
    logits = pair.driver().prefill(sequence, [len(sequence.token_ids)])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_text_after_images_continues(pair: Pair) -> None:
    sequence, expected = pair.prepare(4, 4, 2)
    prompt = list(sequence.token_ids)
    sizes = [(4, 6), (2, 10)]
    images = [random_pixels(pair.variant, *size, seed=size[0]) for size in sizes]
    driver = pair.driver()
    logits = driver.prefill(sequence, [len(prompt)])
    continuation = driver.greedy(sequence, logits[-1], 8)
    found, _ = hf_logits(pair.variant, pair.reference, prompt + continuation, images)
    assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == continuation
    assert found[len(prompt) - 1].argmax() == expected[-1].argmax()


def test_sequences_with_and_without_images_share_a_step(pair: Pair) -> None:
    first, expected = pair.prepare(5, 4, 2)
    token_ids, rows = prompt_of([TEXT[:12]])
    second = ImageSequence(token_ids, rows, torch.arange(12).expand(3, -1))
    alone, _ = hf_logits(pair.variant, pair.reference, token_ids, [])
    driver, cut = pair.driver(), pair.cut(first, 7)
    driver.step([(first, cut)])
    got = driver.step([(second, 12), (first, len(first.token_ids) - cut)])
    torch.testing.assert_close(got[0], alone, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(got[1], expected[cut:], atol=TOLERANCE, rtol=0)
