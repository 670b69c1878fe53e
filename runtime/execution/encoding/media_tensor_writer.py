"""Writes the step tensors of models that take images or sounds.

These are rows of the media tables. Some models also have positions on three axes, or tokens of an
image that see each other.
"""

from __future__ import annotations

import numpy as np

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.step_tensors import GridTensors, LookaheadTensors, MediaTensors
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.execution.encoding.rank_encoder import RankEncoder
from ostinato.runtime.images.grid_positions import grid_positions
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput

__all__ = ("MediaTensorWriter",)


class _Prompt:
    """What stands for the tokens of one prompt; `grid` is None without three axes."""

    def __init__(self, request: Request, encoder: RankEncoder, grid: ImageSpec | None) -> None:
        num_tokens = len(request.prompt_token_ids)
        self.media_rows = np.zeros(num_tokens, dtype=np.int64)  # [num_tokens]
        self.ends = np.zeros(num_tokens, dtype=np.int32)  # [num_tokens]; index after the image
        for one in request.media:
            rows, places = encoder.rows_of(one.digest), self.media_rows[one.begin : one.end]
            if isinstance(one, PromptImage) and one.row_tokens:
                ended = places.reshape(-1, one.row_tokens)  # a view
                ended[:, :-1] = rows.reshape(-1, one.row_tokens - 1)
            else:
                places[:] = rows
            self.ends[one.begin : one.end] = one.end
        self.positions: np.ndarray | None = None  # [num_tokens, 3]
        self.delta = 0  # of the positions after the prompt
        if grid is not None:
            self.positions, self.delta = grid_positions(num_tokens, request.images, grid)


class MediaTensorWriter:
    """Fills the tensors of each step that `MediaTensors` and the tables derived from it add.

    Args:
        buffers: the static buffers; their other tensors are written before.
        encoder: has the rows of each image or sound; None = no request has any.
        images: how the model takes images; None = no request has images.
    """

    def __init__(
        self, buffers: StaticBuffers, encoder: RankEncoder | None, images: ImageSpec | None
    ) -> None:
        self._buffers = buffers
        self._encoder = encoder
        self._grid = images if isinstance(buffers.host, GridTensors) else None
        self._prompts: dict[int, _Prompt] = {}  # by row; only prompts with images or sounds

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Give the row to a new sequence, whose images or sounds have embeddings in the tables."""
        self._prompts.pop(row, None)
        if request.media:
            assert self._encoder is not None, "the engine takes images or sounds"
            self._prompts[row] = _Prompt(request, self._encoder, self._grid)

    def write(self, output: SchedulerOutput) -> None:
        """Write the tensors of a step."""
        host, num_tokens = self._buffers.host, output.num_tokens
        assert isinstance(host, MediaTensors), "the model has declared these step tensors"
        host.media_rows[:num_tokens] = 0
        if isinstance(host, GridTensors):
            host.rope_positions[:num_tokens] = host.positions[:num_tokens, None]
        if isinstance(host, LookaheadTensors):
            host.visible_ends[:num_tokens] = 0
        if not self._prompts:
            return
        begin = 0
        for entry in output.scheduled:
            prompt = self._prompts.get(entry.row)
            if prompt is not None:
                self._write_entry(host, begin, entry, prompt)
            begin += entry.num_new_tokens

    def _write_entry(
        self,
        host: MediaTensors[np.ndarray],
        begin: int,
        entry: ScheduledSequence,
        prompt: _Prompt,
    ) -> None:
        """Write the tokens of one sequence, of which the first has the index `begin`."""
        stop = entry.start + entry.num_new_tokens
        known = min(stop, len(prompt.media_rows))  # positions from here on are output
        count = max(0, known - entry.start)
        if count:
            host.media_rows[begin : begin + count, 0] = prompt.media_rows[entry.start : known]
            if isinstance(host, LookaheadTensors):
                host.visible_ends[begin : begin + count] = prompt.ends[entry.start : known]
        if isinstance(host, GridTensors) and prompt.positions is not None:
            if count:
                host.rope_positions[begin : begin + count] = prompt.positions[entry.start : known]
            host.rope_positions[begin + count : begin + entry.num_new_tokens] += prompt.delta
