"""`SoundEncoder`: the sound tower of one rank and the table that its embeddings are stored in."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from ostinato.models.audio.sound_spec import FRAMES_OF_STATE, STATES_OF_EMBEDDING, SoundSpec
from ostinato.models.audio.sound_tower import SoundTower
from ostinato.runtime.execution.encoding.audio_encoder import copy_features, positions_per_unit
from ostinato.runtime.execution.executor import BeginEncoding

__all__ = ("SoundEncoder",)


class SoundEncoder:
    """Computes the embeddings of windows of sounds.

    Args:
        tower: computes the embeddings.
        table: the table of the model, of `Decoder.media_tables()`.
        spec: how the model takes sounds.
    """

    def __init__(self, tower: SoundTower, table: Tensor, spec: SoundSpec) -> None:
        self._tower = tower
        self._table = table
        self._spec = spec
        self._rows_per_unit = positions_per_unit(tower.config.hidden_size, table.device)

    @property
    def device(self) -> torch.device:
        return self._table.device

    def begin(self, call: BeginEncoding) -> Generator[None, None, None]:
        features = copy_features(call, self.device)
        result = yield from self._tower.encode(features, self._rows_per_unit)
        index = torch.tensor(call.rows, dtype=torch.int64, device=self.device)
        self._table.index_copy_(0, index, result)

    def touch(self) -> None:
        pass  # steps that measure the engine read row 0 only

    def warm_up(self) -> None:
        """Encode the shortest sound: one with one embedding."""
        spec = self._spec
        num_frames = min(FRAMES_OF_STATE * STATES_OF_EMBEDDING + 1, spec.num_frames)
        shape = spec.num_bins, num_frames
        silence = bytes(4 * spec.num_bins * num_frames)
        for _ in self.begin(BeginEncoding(b"", [0], shape, silence, [])):
            pass
        self._table[0].zero_()
