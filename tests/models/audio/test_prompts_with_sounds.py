"""Whole models against transformers on the same weights, prompts and sounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.decoder import Decoder
from tests.models.audio.sound_models import (
    FAMILIES,
    RATE,
    Samples,
    cut_features,
    hf_logits,
    hf_windows,
    load_sound_model,
    make_sound_model,
    random_sound,
    run_tower,
)
from tests.models.vision.image_models import (
    TOLERANCE,
    ImageDriver,
    ImageSequence,
    fill_tables,
    load,
)

TEXT = [(7 * index * index + 13 * index + 5) % 256 for index in range(30)]
SECONDS = (0.6, 0.13, 1.0)  # 15, 3 and 25 embeddings


@dataclass(frozen=True)
class Pair:
    """A model of transformers and this project's model with the same weights."""

    reference: Any
    processor: Any
    own: Decoder
    config: ModelConfig

    def logits(self, token_ids: list[int], sounds: list[Samples]) -> Tensor:
        return hf_logits(self.reference, self.processor, token_ids, sounds)

    def prepare(self, before: int, between: int, sounds: list[Samples]) -> ImageSequence:
        """A prompt whose sounds are in the table.

        Args:
            before: tokens before the first sound.
            between: tokens after each sound but the last; the last has 6.
            sounds: the sounds.
        """
        token_ids, rows, parts = TEXT[:before], [0] * before, list[Tensor]()
        tower = self.own.sound
        assert tower is not None
        for number, sound in enumerate(sounds):
            features = cut_features(hf_windows(self.processor, [sound])[0])
            with torch.inference_mode():
                parts += [run_tower(tower, each)[0] for each in features]
            more = sum(map(len, parts)) - max(rows, default=0)
            token_ids += [self.processor.audio_token_id] * more
            rows += range(max(rows, default=0) + 1, max(rows, default=0) + 1 + more)
            text = TEXT[-6:] if number == len(sounds) - 1 else TEXT[:between]
            token_ids, rows = token_ids + text, rows + [0] * len(text)
        if parts:
            fill_tables(self.own, parts)
        return ImageSequence(token_ids, rows, torch.arange(len(token_ids)).expand(3, -1))

    def driver(self) -> ImageDriver:
        return ImageDriver(self.own, self.config, max_len=640)


def make_pair(path: Path, family: str, window_s: int = 30) -> Pair:
    make_sound_model(path, family, window_s=window_s)
    return Pair(*load_sound_model(path), *load(path))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("model"), request.param, window_s=2)


def random_sounds(count: int) -> list[Samples]:
    return [random_sound(index, int(SECONDS[index] * RATE)) for index in range(count)]


@pytest.mark.parametrize(
    ("before", "between", "count"),
    [(5, 0, 1), (0, 0, 1), (3, 4, 2), (0, 1, 3)],
    ids=["text before", "sound first", "two sounds", "three sounds"],
)
def test_logits_are_those_of_transformers(
    pair: Pair, before: int, between: int, count: int
) -> None:
    sounds = random_sounds(count)
    sequence = pair.prepare(before, between, sounds)
    logits = pair.driver().prefill(sequence, [len(sequence.token_ids)])
    expected = pair.logits(sequence.token_ids, sounds)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    # The sounds have an effect.
    others = [sound[::-1].copy() for sound in sounds]
    assert (pair.logits(sequence.token_ids, others)[-1] - expected[-1]).abs().max() > 0.1


def test_a_sound_of_several_windows(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "audioflamingo3", window_s=2)
    sounds = [random_sound(1, 5 * RATE)]
    sequence = pair.prepare(4, 0, sounds)
    assert len(sequence.token_ids) == 4 + 125 + 6
    logits = pair.driver().prefill(sequence, [60, 75])
    expected = pair.logits(sequence.token_ids, sounds)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_chunks_may_divide_a_sound(pair: Pair) -> None:
    sounds = random_sounds(2)
    sequence = pair.prepare(3, 4, sounds)
    logits = pair.driver().prefill(sequence, [5, 3, 1, len(sequence.token_ids) - 9])
    expected = pair.logits(sequence.token_ids, sounds)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_text_after_sounds_continues(pair: Pair) -> None:
    sounds = random_sounds(2)
    sequence = pair.prepare(4, 4, sounds)
    prompt, driver = list(sequence.token_ids), pair.driver()
    logits = driver.prefill(sequence, [len(prompt)])
    continuation = driver.greedy(sequence, logits[-1], 8)
    found = pair.logits(prompt + continuation, sounds)
    assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == continuation


def test_sequences_with_and_without_sounds_share_a_step(pair: Pair) -> None:
    sounds = random_sounds(1)
    first, second = pair.prepare(5, 4, sounds), pair.prepare(12, 0, [])
    driver = pair.driver()
    driver.step([(first, 7)])
    got = driver.step([(second, 12), (first, len(first.token_ids) - 7)])
    alone, expected = pair.logits(second.token_ids, []), pair.logits(first.token_ids, sounds)
    torch.testing.assert_close(got[0], alone, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(got[1], expected[7:], atol=TOLERANCE, rtol=0)
