"""The towers of Pixtral (arXiv:2410.07073) and Mistral Small 3.1, and their projectors."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn

from ostinato.models.config.vision_config import TowerKind, VisionConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.norm_layers import RMSNorm
from ostinato.models.media.tower_layers import TowerBlock, TowerLinear, tower_options, units
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.patch_grid import patch_places, rotary_rows, split_patches
from ostinato.models.vision.towers.patch_layers import (
    PatchEmbedding,
    Projector,
    run_features,
    run_squares,
)
from ostinato.models.vision.towers.vision_tower import VisionTower

__all__ = ("PixtralTower",)


class _PatchMerger(nn.Module):
    """One state for each square of patches: a norm and a matrix."""

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__()
        self.num_merged = config.merge_size**2
        size = config.hidden_size
        self.norm = RMSNorm(size, config.merger_norm_eps, options)
        self.linear = TowerLinear(size * self.num_merged, size, options, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[squares * num_merged, D] -> [squares, D]."""
        squares = self.norm(hidden).view(-1, self.num_merged, hidden.shape[1])
        # The matrix has the first element of all patches, then the second, and so on.
        return self.linear(squares.transpose(1, 2).flatten(1))


class PixtralTower(VisionTower):
    """Patches of an image of any size, with rotary positions on two axes.

    Layers after the last one whose result is read are left out.
    """

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__()
        options = tower_options(options)
        self.config = config
        self.patch_embed = PatchEmbedding(config, options, bias=False)
        self.pre_norm = RMSNorm(config.hidden_size, config.norm_eps, options)
        self.blocks = nn.ModuleList(
            TowerBlock(config, options) for _ in range(config.num_used_layers)
        )
        is_merged = config.kind is TowerKind.mistral3
        self.merger = _PatchMerger(config, options) if is_merged else None
        self.projector = Projector(config, options)

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        config = self.config
        height, width = (length // config.patch_size for length in pixels.shape[:2])
        patches = split_patches(pixels, config.patch_size, config.merge_size)
        parts: list[Tensor] = []
        for some in units(len(patches), rows_per_unit):
            parts.append(self.pre_norm(self.patch_embed.embed(patches[some], spec)))
            yield
        rows, columns = patch_places(height, width, config.merge_size, pixels.device)
        rope = rotary_rows(rows, columns, config.head_dim, config.rope_theta, alternates=True)
        features = yield from run_features(
            self.blocks, torch.cat(parts), rope, config.feature_layers, rows_per_unit
        )

        def project(some: Tensor) -> Tensor:
            return self.projector(some if self.merger is None else self.merger(some))

        return (yield from run_squares(project, features, config.merge_size**2, rows_per_unit))
