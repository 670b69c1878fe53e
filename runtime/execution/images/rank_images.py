"""`RankImages`: computes the embeddings of images on one rank, in units between the steps."""

from __future__ import annotations

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

# Patches of one unit. On a CPU, a unit of a large tower then takes some ten milliseconds. On a GPU,
# a unit is the part of a layer for all patches.
_CPU_ROWS = 64
_GPU_ROWS = 1 << 20


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
        self._rows_per_unit = _CPU_ROWS if self._device.type == "cpu" else _GPU_ROWS
        self._jobs = deque[_Job]()
        self._rows: dict[bytes, np.ndarray] = {}  # [num_tokens] int64, for each image

    def begin(self, call: BeginImage) -> None:
        """Take an image. `advance` computes its embeddings."""
        self._forget(call.dropped)
        self._rows[call.digest] = np.array(call.rows, dtype=np.int64)
        if self._tower is None:
            return
        array = np.frombuffer(call.pixels, dtype=np.uint8)
        pixels = torch.from_numpy(array.reshape(call.height, call.width, 3).copy())
        units = self._tower.encode(pixels.to(self._device), self._spec, self._rows_per_unit)
        self._jobs.append(_Job(call.digest, call.rows, units))

    @torch.inference_mode()
    def advance(self, call: AdvanceImages) -> list[bytes]:
        """Compute a part of the embeddings; returns the images whose embeddings are complete."""
        self._forget(call.dropped)
        ended: list[bytes] = []
        for _ in range(call.num_units):
            if not self._jobs:
                break
            job = self._jobs[0]
            try:
                next(job.units)
            except StopIteration as end:
                self._store(job.rows, end.value)
                self._jobs.popleft()
                ended.append(job.digest)
        if self._device.type == "cuda":  # the caller measures the time
            torch.cuda.current_stream(self._device).synchronize()
        return ended

    def warm_up(self) -> None:
        """Compute the embeddings of a small image, so that all kernels are loaded."""
        spec = self._spec
        edge = spec.patch_size * spec.merge_size
        height, width = edge, edge
        if spec.sizing is ImageSizing.fixed:
            height, width = spec.crop if spec.crop[0] else spec.size
        pixels = bytes(height * width * 3)
        count = spec.num_tokens if spec.sizing is ImageSizing.fixed else 1
        self.begin(BeginImage(b"", [0] * count, height, width, pixels, []))
        while self._jobs:
            self.advance(AdvanceImages(1, []))
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
        for digest in digests:
            self._rows.pop(digest, None)
