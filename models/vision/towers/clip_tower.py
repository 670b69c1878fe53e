"""Towers that take images of one size, and the one of LLaVA 1.5 (arXiv:2310.03744).

They are CLIP (arXiv:2103.00020) or SigLIP (arXiv:2303.15343), and a projector to the decoder.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

from ostinato.models.config.vision_config import TowerKind, VisionConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.norm_layers import LayerNorm
from ostinato.models.media.tower_layers import TowerBlock, tower_options
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.patch_grid import split_patches
from ostinato.models.vision.towers.patch_layers import (
    PatchEmbedding,
    Projector,
    run_features,
    run_squares,
)
from ostinato.models.vision.towers.vision_tower import VisionTower

__all__ = ("ClipTower", "FixedTower")


class FixedTower(VisionTower):
    """CLIP or SigLIP, without the last norm and the head. All images have one size.

    Layers after the last one whose result is read are left out.
    """

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__()
        options = tower_options(options)
        self.config = config
        is_clip = config.kind is TowerKind.clip
        size = config.hidden_size
        num_positions = (config.image_size // config.patch_size) ** 2 + is_clip
        self.patch_embed = PatchEmbedding(config, options, bias=not is_clip)
        self.position_embedding = options.empty(num_positions, size)
        self.class_embedding = options.empty(size) if is_clip else None
        self.pre_norm = LayerNorm(size, config.norm_eps, options) if is_clip else None
        self.blocks = nn.ModuleList(
            TowerBlock(config, options) for _ in range(config.num_used_layers)
        )

    def compute_features(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int, layers: Sequence[int]
    ) -> Generator[None, None, Tensor]:
        """Compute the states of an image, in units, as `encode` does.

        Args:
            pixels: as `encode` takes them.
            spec: how the colours are scaled.
            rows_per_unit: patches of a unit.
            layers: the layers whose results are wanted. 0 = the states before the first layer.

        Returns:
            [positions, D * layers], the results one after the other.
        """
        hidden = self._embed(pixels, spec)
        return (yield from run_features(self.blocks, hidden, None, layers, rows_per_unit))

    def _embed(self, pixels: Tensor, spec: ImageSpec) -> Tensor:
        """The states before the first layer: [positions, D]."""
        edge = self.config.image_size
        if pixels.shape != (edge, edge, 3):
            raise ValueError(
                f"an image of shape {list(pixels.shape)} was given to a tower that takes images of "
                f"{[edge, edge, 3]}; preprocessor_config.json must state the size of vision_config"
            )
        hidden = self.patch_embed.embed(split_patches(pixels, self.config.patch_size), spec)
        if self.class_embedding is not None:
            hidden = torch.cat((self.class_embedding[None], hidden))
        hidden = hidden + self.position_embedding
        return hidden if self.pre_norm is None else self.pre_norm(hidden)


class ClipTower(FixedTower):
    """The tower of LLaVA: CLIP or SigLIP, and a projector that reads the results of some layers."""

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        self.projector = Projector(config, tower_options(options))

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        layers = self.config.feature_layers
        features = yield from self.compute_features(pixels, spec, rows_per_unit, layers)
        if self.config.drops_first:
            features = features[1:]
        return (yield from run_squares(self.projector, features, 1, rows_per_unit))
