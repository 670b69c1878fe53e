"""The towers of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923)."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor, nn

from ostinato.models.config.vision_config import TowerKind, VisionConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.media.tower_layers import (
    TowerBlock,
    run_block,
    run_windows,
    tower_options,
    units,
)
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.patch_grid import (
    Windows,
    patch_places,
    rotary_rows,
    split_patches,
    windows_of,
)
from ostinato.models.vision.towers.patch_layers import Merger, PatchEmbedding
from ostinato.models.vision.towers.vision_tower import VisionTower

__all__ = ("QwenTower",)


class QwenTower(VisionTower):
    """Patches with rotary positions on two axes, and a merger of squares of patches.

    The patches of Qwen2.5-VL see their window, and in some layers the whole image.
    """

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__()
        options = tower_options(options)
        self.config = config
        has_bias = config.kind is TowerKind.qwen3
        self.patch_embed = PatchEmbedding(config, options, bias=has_bias)
        self.blocks = nn.ModuleList(TowerBlock(config, options) for _ in range(config.num_layers))
        self.merger = Merger(config, options)

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        config = self.config
        height, width = (length // config.patch_size for length in pixels.shape[-3:-1])
        patches = split_patches(pixels, config.patch_size, config.merge_size)
        rows, columns = patch_places(height, width, config.merge_size, pixels.device)
        windows = None
        if config.window:
            squares = height // config.merge_size, width // config.merge_size
            windows = windows_of(*squares, config.window, pixels.device)
            order = self._patches_of(windows)
            patches, rows, columns = patches[order], rows[order], columns[order]
        parts: list[Tensor] = []
        for some in units(len(patches), rows_per_unit):
            parts.append(self.patch_embed.embed(patches[some], spec))
            yield
        hidden = torch.cat(parts)
        yield from self._add_positions(hidden, rows, columns, (height, width), rows_per_unit)
        rope = rotary_rows(rows, columns, config.head_dim, config.rope_theta)
        deep: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            assert isinstance(block, TowerBlock), "the list has blocks only"
            if windows is None or number in config.full_layers:
                yield from run_block(block, hidden, rope, rows_per_unit)
            else:
                num_merged = config.merge_size**2
                sizes = [(count, size * num_merged) for count, size in windows.groups]
                yield from run_windows(block, hidden, rope, sizes, rows_per_unit)
            if (merger := self._merger_after(number)) is not None:
                deep.append((yield from merger.run(hidden, rows_per_unit)))
        merged = yield from self.merger.run(hidden, rows_per_unit)
        if windows is not None:
            merged = merged[windows.order.argsort()]
        return torch.cat((merged, *deep), dim=1)

    def _patches_of(self, windows: Windows) -> Tensor:
        """[patches] int64: the patches in the order of the windows."""
        num_merged = self.config.merge_size**2
        inside = torch.arange(num_merged, device=windows.order.device)
        return (windows.order[:, None] * num_merged + inside).view(-1)

    def _add_positions(
        self, hidden: Tensor, rows: Tensor, columns: Tensor, size: tuple[int, int], most: int
    ) -> Iterator[None]:
        """Add learned positions, if the tower has any, to the embedded patches [patches, D].

        Args:
            hidden: changed in place.
            rows: [patches] int64, the row of each patch.
            columns: [patches] int64, the column of each patch.
            size: rows and columns of patches.
            most: patches of a unit.
        """
        return iter(())

    def _merger_after(self, layer: int) -> Merger | None:
        """The merger that reads the result of a layer, if its result is for the decoder too."""
        return None
