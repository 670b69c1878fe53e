"""`RankImages`: computes the embeddings of images on one rank, in units between the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.models.vision.vision_tower import VisionTower
from ostinato.runtime.execution.executor import AdvanceImages, BeginImage

__all__ = ("RankImages",)

# Patches of one unit on a CPU, so that a unit of a large tower takes some ten milliseconds. The
# attention of a patch takes longer in a larger image, so units of large images have fewer patches.
_MOST_ROWS, _LEAST_ROWS = 64, 8
_PATCHES_PER_ROWS = 2048  # an image up to this size has units of `_MOST_ROWS`
_GPU_ROWS = 1 << 20  # on a GPU, a unit is the part of a layer for all patches


class _Job(NamedTuple):
    digest: bytes
    rows: list[int]
    units: Generator[None, None, Tensor]


class RankImages:
    """The image tables of one rank and their contents. One thread calls it.

    Args:
        tower: computes the embeddings; None = this rank has no layer that reads them.
        tables: the tables of the model, `Decoder.image_tables()`.
        spec: how the model takes images.
    """

    def __init__(
        self, tower: VisionTower | None, tables: Sequence[Tensor | None], spec: ImageSpec
    ) -> None:
        self._tower = tower
        self._tables = tables
        self._spec = spec
        self._device = next((one.device for one in tables if one is not None), torch.device("cpu"))
        self._jobs = deque[_Job]()
        self._completed: list[bytes] = []  # images that no answer has named yet
        self._rows: dict[bytes, np.ndarray] = {}  # [num_tokens] int64, for each image

    def begin(self, call: BeginImage) -> None:
        """Take an image. `advance` computes its embeddings."""
        self._forget(call.dropped)
        self._rows[call.digest] = np.array(call.rows, dtype=np.int64)
        if self._tower is None:
            self._completed.append(call.digest)
            return
        array = np.frombuffer(call.pixels, dtype=np.uint8)
        pixels = torch.from_numpy(array.reshape(call.height, call.width, 3).copy())
        rows = self._rows_per_unit(call.height, call.width)
        units = self._tower.encode(pixels.to(self._device), self._spec, rows)
        self._jobs.append(_Job(call.digest, call.rows, units))

    @torch.inference_mode()
    def advance(self, call: AdvanceImages) -> list[bytes]:
        """Compute a part of the embeddings; returns the images that are complete since last time.

        Computes at least one unit.
        """
        self._forget(call.dropped)
        left_s = call.seconds
        while self._jobs:
            left_s -= self._compute_unit(self._jobs[0])
            if left_s <= 0.0:
                break
        completed, self._completed = self._completed, []
        return completed

    def _compute_unit(self, job: _Job) -> float:
        """Compute one unit of the first job; returns its seconds on the device."""
        begin, events = time.perf_counter(), None
        if self._device.type == "cuda":  # without the step that is in flight
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        try:
            next(job.units)
        except StopIteration as end:
            self._store(job.rows, end.value)
            self._jobs.popleft()
            self._completed.append(job.digest)
        if events is None:
            return time.perf_counter() - begin
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    def _rows_per_unit(self, height: int, width: int) -> int:
        if self._device.type != "cpu":
            return _GPU_ROWS
        num_patches = height * width // self._spec.patch_size**2
        rows = _MOST_ROWS * _PATCHES_PER_ROWS // max(num_patches, 1)
        return min(max(rows, _LEAST_ROWS), _MOST_ROWS)

    def warm_up(self) -> None:
        """Compute the embeddings of a small image, so that all kernels are loaded."""
        spec = self._spec
        is_fixed = spec.sizing is ImageSizing.fixed
        height, width = spec.fixed_size if is_fixed else (spec.unit, spec.unit)
        rows = [0] * spec.count_tokens(height, width)
        self.begin(BeginImage(b"", rows, height, width, bytes(height * width * 3), []))
        while self._jobs:
            self.advance(AdvanceImages(1.0, []))
        for table in self._tables:
            if table is not None:
                table[0].zero_()
        self._forget([b""])

    def rows_of(self, digest: bytes) -> np.ndarray:
        """[num_tokens] int64: the rows of an image's embeddings."""
        return self._rows[digest]

    def close(self) -> None:
        """Drop the unfinished work."""
        self._jobs.clear()

    def _store(self, rows: list[int], result: Tensor) -> None:
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        width = result.shape[1] // len(self._tables)
        for table, part in zip(self._tables, result.split(width, 1), strict=True):
            if table is not None:
                table.index_copy_(0, index, part)

    def _forget(self, digests: Collection[bytes]) -> None:
        if digests:
            self._jobs = deque(job for job in self._jobs if job.digest not in digests)
            self._completed = [one for one in self._completed if one not in digests]
        for digest in digests:
            self._rows.pop(digest, None)
