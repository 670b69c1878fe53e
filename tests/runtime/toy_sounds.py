"""A sound tower without weights, and sounds for it: an embedding says which frames it is made of."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.models.audio.sound_spec import FRAMES_OF_STATE, STATES_OF_EMBEDDING, SoundSpec
from ostinato.models.audio.sound_tower import SoundTower
from ostinato.models.config.audio_config import AudioEncoderConfig
from ostinato.runtime.types.audio import PromptSound, audio_digest

SOUND_SPEC = SoundSpec(
    sampling_rate=16,
    num_bins=3,
    fft_size=4,
    hop_size=1,
    window_s=2,
    placeholder_id=7,
    placeholder="<sound>",
    marked_placeholder="<sound>",
    max_windows=2,
)
WIDTH = SOUND_SPEC.num_bins + 1
_FRAMES = FRAMES_OF_STATE * STATES_OF_EMBEDDING  # of one embedding


class ToySoundTower(SoundTower):
    """An embedding is the sum of four frames, and 1. One unit for each embedding."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.config = AudioEncoderConfig(
            num_bins=SOUND_SPEC.num_bins,
            num_positions=SOUND_SPEC.num_frames // FRAMES_OF_STATE,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=1,
            activation="gelu",
            norm_eps=1e-5,
        )

    def encode(self, features: Tensor, rows_per_unit: int) -> Generator[None, None, Tensor]:
        result = _sums(features)
        for _ in range(len(result)):
            yield
        return result


def _sums(features: Tensor) -> Tensor:
    num_states = features.shape[1] // FRAMES_OF_STATE
    count = num_states // STATES_OF_EMBEDDING
    sums = features[:, : count * _FRAMES].view(-1, count, _FRAMES).sum(2)
    return torch.cat([sums, torch.ones(1, count)]).T


def toy_sound(seed: int, num_tokens: int, begin: int = 0, *, is_odd: bool = False) -> PromptSound:
    """A window of a sound whose features follow from a seed.

    Args:
        num_tokens: 1 to 8.
        is_odd: the window has a last state that no embedding reads; `num_tokens` is below 8.
    """
    num_states = STATES_OF_EMBEDDING * num_tokens + is_odd
    num_frames = min(FRAMES_OF_STATE * num_states + 1, SOUND_SPEC.num_frames)
    count = SOUND_SPEC.num_bins * num_frames
    values = np.array([(seed * 31 + place * 7) % 256 for place in range(count)], np.float32)
    data = values.tobytes()
    return PromptSound(
        digest=audio_digest(SOUND_SPEC.num_bins, num_frames, data),
        begin=begin,
        num_tokens=num_tokens,
        num_bins=SOUND_SPEC.num_bins,
        num_frames=num_frames,
        features=data,
    )


def toy_sound_embeddings(sound: PromptSound) -> Tensor:
    """[num_tokens, WIDTH]: what the tower gives for a window."""
    features = np.frombuffer(sound.features, np.float32).reshape(sound.shape).copy()
    return _sums(torch.from_numpy(features))
