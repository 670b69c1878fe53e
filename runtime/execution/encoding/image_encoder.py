"""`ImageEncoder`: the vision tower of one rank and the tables that its embeddings are stored in."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor

from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.towers.vision_tower import VisionTower
from ostinato.runtime.execution.executor import BeginEncoding

__all__ = ("ImageEncoder",)

# Patches of one unit on a CPU, so that a unit of a large tower takes some ten milliseconds. The
# attention of a patch takes longer in a larger image, so units of large images have fewer patches.
_MOST_ROWS, _LEAST_ROWS = 64, 8
_PATCHES_PER_ROWS = 2048  # an image up to this size has units of `_MOST_ROWS`
_GPU_ROWS = 1 << 20  # on a GPU, a unit is the part of a layer for all patches


class ImageEncoder:
    """Computes the embeddings of images and of pairs of frames.

    Args:
        tower: computes the embeddings.
        tables: the tables of the model, `Decoder.media_tables()`.
        spec: how the model takes images.
    """

    def __init__(
        self, tower: VisionTower, tables: Sequence[Tensor | None], spec: ImageSpec
    ) -> None:
        self._tower = tower
        self._tables = tables
        self._spec = spec
        self._device = next((one.device for one in tables if one is not None), torch.device("cpu"))

    @property
    def device(self) -> torch.device:
        return self._device

    def begin(self, call: BeginEncoding) -> Generator[None, None, None]:
        pixels = np.frombuffer(call.data, dtype=np.uint8).reshape(call.shape).copy()
        height, width, _ = call.shape[-3:]
        rows = self._rows_per_unit(height, width)
        copied = torch.from_numpy(pixels).to(self._device)
        result = yield from self._tower.encode(copied, self._spec, rows)
        self._store(call.rows, result)

    def touch(self) -> None:
        pass  # steps that measure the engine read row 0 only

    def warm_up(self) -> None:
        spec = self._spec
        height, width = spec.fixed_size if spec.has_one_size else (spec.unit, spec.unit)
        rows = [0] * spec.count_tokens(height, width)
        pixels = bytes(height * width * 3)
        for _ in self.begin(BeginEncoding(b"", rows, (height, width, 3), pixels, [])):
            pass
        for table in self._tables:
            if table is not None:
                table[0].zero_()

    def _rows_per_unit(self, height: int, width: int) -> int:
        if self._device.type != "cpu":
            return _GPU_ROWS
        num_patches = height * width // self._spec.patch_size**2
        rows = _MOST_ROWS * _PATCHES_PER_ROWS // max(num_patches, 1)
        return min(max(rows, _LEAST_ROWS), _MOST_ROWS)

    def _store(self, rows: list[int], result: Tensor) -> None:
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        width = result.shape[1] // len(self._tables)
        for table, part in zip(self._tables, result.split(width, 1), strict=True):
            if table is not None:
                table.index_copy_(0, index, part)
