"""The tower of models that take sounds, against transformers on the same audio and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.models.audio.sound_tower import SoundTower
from tests.models.audio.sound_models import (
    FAMILIES,
    RATE,
    cut_features,
    hf_embeddings,
    hf_windows,
    load_sound_model,
    make_sound_model,
    random_sound,
    run_tower,
)
from tests.models.vision.image_models import load

HOP = 160
# Frames: the first length with an embedding, odd and even numbers of states, means and windows.
FRAMES = (3, 4, 5, 6, 7, 8, 9, 10, 11, 97, 98, 99, 100, 1501, 2995, 2996, 2997, 2998, 2999, 3000)


def tower_of(path: Path) -> SoundTower:
    tower = load(path)[0].sound
    assert tower is not None
    return tower


@pytest.fixture(scope="module", params=FAMILIES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SoundTower, Any, Any]:
    """The tower, and the model and the processor of transformers."""
    path = make_sound_model(tmp_path_factory.mktemp("model"), request.param)
    return tower_of(path), *load_sound_model(path)


@torch.inference_mode()
def check(model: tuple[SoundTower, Any, Any], num_samples: int, seed: int = 0) -> list[int]:
    """Compare all windows of a random sound; returns the numbers of their embeddings."""
    tower, reference, processor = model
    sound = random_sound(seed, num_samples)
    expected = [each for each in hf_embeddings(reference, processor, sound) if len(each)]
    found = [run_tower(tower, each)[0] for each in cut_features(hf_windows(processor, [sound])[0])]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    return [len(each) for each in found]


@pytest.mark.parametrize("num_frames", FRAMES)
def test_embeddings_are_those_of_transformers(
    model: tuple[SoundTower, Any, Any], num_frames: int
) -> None:
    # The last frame is counted if one of its samples is there.
    assert check(model, num_frames * HOP) == [(num_frames + 1) // 4]
    assert check(model, (num_frames - 1) * HOP + 1) == [(num_frames + 1) // 4]


def test_windows_of_a_long_sound(tmp_path: Path) -> None:
    """The last window has an embedding, or none."""
    path = make_sound_model(tmp_path, "audioflamingo3", window_s=2)
    model = tower_of(path), *load_sound_model(path)
    assert check(model, 5 * RATE) == [50, 50, 25]
    assert check(model, 4 * RATE + 3 * HOP) == [50, 50, 1]
    assert check(model, 4 * RATE + 2 * HOP) == [50, 50]
    assert check(model, 4 * RATE) == [50, 50]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_activation_is_that_of_the_layers_alone(family: str, tmp_path: Path) -> None:
    path = make_sound_model(tmp_path, family, window_s=2, num_bins=80, activation="relu")
    assert check((tower_of(path), *load_sound_model(path)), RATE) == [25]


@torch.inference_mode()
def test_units_do_not_change_the_result(model: tuple[SoundTower, Any, Any]) -> None:
    tower, _, processor = model
    (features,) = cut_features(hf_windows(processor, [random_sound(1, 3 * RATE)])[0])
    whole, count = run_tower(tower, features, 1 << 20)
    assert count == 2 + 3 * tower.config.num_layers + 1
    for rows_per_unit in (7, 64):
        some, more = run_tower(tower, features, rows_per_unit)
        assert more > count
        torch.testing.assert_close(some, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(128, 2), (128, 3), (128, 6), (128, 3001), (80, 7), (7,)])
def test_a_spectrogram_of_another_shape_is_refused(
    model: tuple[SoundTower, Any, Any], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"\[128, 3000\], or \[128, T\] with an odd T from 5 to"):
        next(model[0].encode(torch.zeros(shape), 64))
