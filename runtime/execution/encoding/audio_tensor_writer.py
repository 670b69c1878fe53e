"""Writes the step tensor of models that take audio: the window that each token's sequence reads."""

from __future__ import annotations

import numpy as np

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.step_tensors import AudioTensors
from ostinato.runtime.execution.encoding.rank_encoder import RankEncoder
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("AudioTensorWriter",)


class AudioTensorWriter:
    """Fills `AudioTensors.audio_windows` of each step.

    Args:
        buffers: the static buffers; their other tensors are written before.
        encoder: has the window of each audio.
        num_windows: windows of the caches, without window 0.
    """

    def __init__(self, buffers: StaticBuffers, encoder: RankEncoder, num_windows: int) -> None:
        self._buffers = buffers
        self._encoder = encoder
        self._num_windows = num_windows
        self._by_row = np.zeros(len(buffers.host.seq_lens), dtype=np.int64)

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Give the row to a new sequence, whose audio is encoded."""
        if request.audio is not None:
            self._by_row[row] = self._encoder.rows_of(request.audio.digest)[0]
        else:
            # Steps that measure the engine read as many windows as the steps of a server.
            self._by_row[row] = 1 + row % self._num_windows

    def write(self, output: SchedulerOutput) -> None:
        """Write the tensor of a step."""
        host = self._buffers.host
        assert isinstance(host, AudioTensors), "the model has declared these step tensors"
        windows = self._by_row[[entry.row for entry in output.scheduled]]
        counts = [entry.num_new_tokens for entry in output.scheduled]
        host.audio_windows[: output.num_tokens, 0] = windows.repeat(counts)
