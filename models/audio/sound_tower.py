"""The tower of models that take sounds: a spectrogram to embeddings of the decoder's hidden size.

It is that of Qwen2-Audio (arXiv:2407.10759) and Audio Flamingo 3 (arXiv:2507.08128): the encoder of
Whisper, the mean of each few successive states, a norm, and a projector.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn

from ostinato.models.audio.audio_tower import AudioTower
from ostinato.models.audio.sound_spec import FRAMES_OF_STATE, STATES_OF_EMBEDDING
from ostinato.models.config.audio_config import SoundConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.media.tower_layers import TowerLinear, tower_options, units
from ostinato.ops.activation import activate

__all__ = ("SoundTower",)


class _Projector(nn.Module):
    """One matrix, or two with an activation between them."""

    def __init__(self, config: SoundConfig, options: BuildOptions) -> None:
        super().__init__()
        self.activation = config.projector_activation
        width, size, bias = config.encoder.hidden_size, config.output_size, config.projector_bias
        self.linear = self.linear_1 = self.linear_2 = None
        if config.has_hidden_layer:
            self.linear_1 = TowerLinear(width, size, options, bias=bias)
            self.linear_2 = TowerLinear(size, size, options, bias=bias)
        else:
            self.linear = TowerLinear(width, size, options, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, output_size]."""
        if self.linear is not None:
            return self.linear(states)
        assert self.linear_1 is not None, "without `linear` there are two matrices"
        assert self.linear_2 is not None, "without `linear` there are two matrices"
        return self.linear_2(activate(self.linear_1(states), self.activation))


class SoundTower(AudioTower):
    """The encoder of one window of a sound, and what turns its states into embeddings.

    Positions see the states of the sound alone, not those of the silence after it. So the later
    states are not computed.
    """

    def __init__(self, config: SoundConfig, options: BuildOptions) -> None:
        super().__init__(config.encoder, options)
        self.sound_config = config
        self.projector = _Projector(config, tower_options(options))

    def encode(self, features: Tensor, rows_per_unit: int) -> Generator[None, None, Tensor]:
        """Compute the embeddings of one window, in units between which other work can be done.

        The generator yields after each unit. A unit is at most one layer's work for `rows_per_unit`
        positions.

        Args:
            features: [num_bins, T] float32, a log-mel spectrogram. With n states, T is 2n + 1, or
                the frames of a full window, which are 2n.
            rows_per_unit: positions of a unit.

        Returns:
            [n // STATES_OF_EMBEDDING, output_size] in the tower's dtype. The states of an
            incomplete mean are seen by others, and are in no embedding.

        Raises:
            ValueError: the spectrogram has another shape, or is too short for an embedding.
        """
        num_states = self._count_states(features)
        states = yield from self.compute_states(features, num_states, rows_per_unit)
        size = STATES_OF_EMBEDDING
        means = states[: num_states // size * size].unflatten(0, (-1, size)).mean(1)
        parts: list[Tensor] = []
        for rows in units(len(means), rows_per_unit):
            parts.append(self.projector(self.final_norm(means[rows])))
            yield
        return torch.cat(parts)

    def _count_states(self, features: Tensor) -> int:
        """The states of a spectrogram of valid shape."""
        num_bins, most = self.config.num_bins, self.config.num_frames
        least = FRAMES_OF_STATE * STATES_OF_EMBEDDING
        shape = tuple(features.shape)
        if len(shape) == 2 and shape[0] == num_bins and least <= shape[1] <= most:
            num_states, is_odd = divmod(shape[1], FRAMES_OF_STATE)
            if is_odd or shape[1] == most:
                return num_states
        raise ValueError(
            f"a spectrogram of shape {list(shape)} was given to an encoder that takes [{num_bins}, "
            f"{most}], or [{num_bins}, T] with an odd T from {least + 1} to {most - 1}"
        )
