"""Writes the step tensors of models that take images: table rows and positions on three axes."""

from __future__ import annotations

import numpy as np

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.step_tensors import GridTensors, ImageTensors
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.execution.encoding.rank_encoder import RankEncoder
from ostinato.runtime.images.grid_positions import grid_positions
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput

__all__ = ("ImageTensorWriter",)


class _Prompt:
    """The image rows and the positions of one prompt."""

    def __init__(self, request: Request, images: RankEncoder, spec: ImageSpec, *, has_grid: bool):
        num_tokens = len(request.prompt_token_ids)
        self.image_rows = np.zeros(num_tokens, dtype=np.int64)  # [num_tokens]
        for image in request.images:
            self.image_rows[image.begin : image.end] = images.rows_of(image.digest)
        self.positions: np.ndarray | None = None  # [num_tokens, 3]
        self.delta = 0  # of the positions after the prompt
        if has_grid:
            self.positions, self.delta = grid_positions(num_tokens, request.images, spec)


class ImageTensorWriter:
    """Fills `ImageTensors.image_rows` and `GridTensors.rope_positions` of each step.

    Args:
        buffers: the static buffers; their other tensors are written before.
        images: has the rows of each image; None = no request has images.
        spec: how the model takes images; None = as `images`.
    """

    def __init__(
        self, buffers: StaticBuffers, images: RankEncoder | None, spec: ImageSpec | None
    ) -> None:
        self._buffers = buffers
        self._images = images
        self._spec = spec
        self._has_grid = isinstance(buffers.host, GridTensors)
        self._prompts: dict[int, _Prompt] = {}  # by row; only prompts with images

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Give the row to a new sequence. The embeddings of its images are in the tables."""
        self._prompts.pop(row, None)
        if request.images:
            assert self._images is not None, "the engine takes images"
            assert self._spec is not None, "the engine takes images"
            self._prompts[row] = _Prompt(request, self._images, self._spec, has_grid=self._has_grid)

    def write(self, output: SchedulerOutput) -> None:
        """Write the tensors of a step."""
        host, num_tokens = self._buffers.host, output.num_tokens
        assert isinstance(host, ImageTensors), "the model has declared these step tensors"
        host.image_rows[:num_tokens] = 0
        if isinstance(host, GridTensors):
            host.rope_positions[:num_tokens] = host.positions[:num_tokens, None]
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
        host: ImageTensors[np.ndarray],
        begin: int,
        entry: ScheduledSequence,
        prompt: _Prompt,
    ) -> None:
        """Write the tokens of one sequence, of which the first has the index `begin`."""
        stop = entry.start + entry.num_new_tokens
        known = min(stop, len(prompt.image_rows))  # positions from here on are output
        count = max(0, known - entry.start)
        if count:
            host.image_rows[begin : begin + count, 0] = prompt.image_rows[entry.start : known]
        if isinstance(host, GridTensors) and prompt.positions is not None:
            if count:
                host.rope_positions[begin : begin + count] = prompt.positions[entry.start : known]
            host.rope_positions[begin + count : begin + entry.num_new_tokens] += prompt.delta
