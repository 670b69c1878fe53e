"""The encoder of Whisper (arXiv:2212.04356): a spectrogram to the states that a decoder reads."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.audio.sound_spec import FRAMES_OF_STATE
from ostinato.models.config.audio_config import AudioEncoderConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.norm_layers import LayerNorm
from ostinato.models.media.tower_layers import (
    TowerBlock,
    TowerLinear,
    run_block,
    tower_options,
    units,
)
from ostinato.ops.activation import activate

__all__ = ("AudioTower",)

_TAPS = 3  # frames that a convolution reads


class _Convolution(TowerLinear):
    """A convolution over frames with three taps, as a matrix: a checkpoint stores [out, in, 3]."""

    def __init__(self, in_size: int, out_size: int, options: BuildOptions) -> None:
        super().__init__(in_size * _TAPS, out_size, options, bias=True)
        self.kernel = (in_size, _TAPS)


class AudioTower(nn.Module):
    """Two convolutions, learned positions and layers whose positions all see each other.

    The spectrogram of a window is padded with silence, and the padding is attended to, as in
    training.
    """

    def __init__(self, config: AudioEncoderConfig, options: BuildOptions) -> None:
        super().__init__()
        options = tower_options(options)
        self.config = config
        size = config.hidden_size
        self.conv1 = _Convolution(config.num_bins, size, options)
        self.conv2 = _Convolution(size, size, options)
        self.position_embedding = options.empty(config.num_positions, size)
        self.blocks = nn.ModuleList(TowerBlock(config, options) for _ in range(config.num_layers))
        self.final_norm = LayerNorm(size, config.norm_eps, options)

    def encode(self, features: Tensor, rows_per_unit: int) -> Generator[None, None, Tensor]:
        """Compute the states of one window, in units between which other work can be done.

        The generator yields after each unit. A unit is at most one layer's work for `rows_per_unit`
        positions.

        Args:
            features: [num_bins, num_frames] float32, a log-mel spectrogram.
            rows_per_unit: positions of a unit.

        Returns:
            [num_positions, hidden_size] in the tower's dtype.
        """
        wanted = self.config.num_bins, self.config.num_frames
        if features.shape != wanted:
            raise ValueError(
                f"a spectrogram of shape {list(features.shape)} was given to an encoder that takes "
                f"{list(wanted)}"
            )
        hidden = yield from self.compute_states(features, self.config.num_positions, rows_per_unit)
        return self.final_norm(hidden)

    def compute_states(
        self, features: Tensor, num_states: int, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        """Compute the first states of a window, before the last norm, in units.

        The states see each other, and no later ones.

        Args:
            features: [num_bins, T] float32. T is at least 2 * num_states. The last state reads
                frame 2 * num_states too, which is zero if T is less.
            num_states: at most num_positions.
            rows_per_unit: positions of a unit.

        Returns:
            [num_states, hidden_size] in the tower's dtype.
        """
        frames = features.T.to(self.position_embedding.dtype)
        num_frames = FRAMES_OF_STATE * num_states
        frames = yield from _convolve(self.conv1, frames, 1, num_frames, 2 * rows_per_unit)
        hidden = yield from _convolve(
            self.conv2, frames, FRAMES_OF_STATE, num_states, rows_per_unit
        )
        hidden = hidden + self.position_embedding[:num_states]
        for block in self.blocks:
            assert isinstance(block, TowerBlock), "the list has blocks only"
            yield from run_block(block, hidden, None, rows_per_unit)
        return hidden


def _convolve(
    convolution: _Convolution, frames: Tensor, stride: int, num_results: int, rows_per_unit: int
) -> Generator[None, None, Tensor]:
    """[T, in] -> [num_results, out] after GELU, for every `stride`th frame.

    Frames outside of [0, T) are zero.
    """
    taps = F.pad(frames, (0, 0, 1, 1)).unfold(0, _TAPS, stride)[:num_results]  # [.., in, 3]
    parts: list[Tensor] = []
    for rows in units(num_results, rows_per_unit):
        parts.append(activate(convolution(taps[rows].flatten(1)), "gelu"))
        yield
    return torch.cat(parts)
