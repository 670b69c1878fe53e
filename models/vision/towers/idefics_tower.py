"""The tower of Idefics3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299)."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.vision_config import VisionConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.norm_layers import LayerNorm
from ostinato.models.media.tower_layers import (
    TowerBlock,
    TowerLinear,
    tower_options,
)
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.patch_grid import patch_places, split_patches
from ostinato.models.vision.towers.patch_layers import PatchEmbedding, run_features, run_squares
from ostinato.models.vision.towers.vision_tower import VisionTower

__all__ = ("IdeficsTower",)


class IdeficsTower(VisionTower):
    """SigLIP (arXiv:2303.15343) for square images, and one matrix after the merged patches."""

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__()
        options = tower_options(options)
        self.config = config
        size = config.hidden_size
        self.edge = config.image_size // config.patch_size  # places of the table's edge
        self.patch_embed = PatchEmbedding(config, options, bias=True)
        self.position_embedding = options.empty(self.edge**2, size)
        self.blocks = nn.ModuleList(TowerBlock(config, options) for _ in range(config.num_layers))
        self.last_norm = LayerNorm(size, config.norm_eps, options)
        num_merged = config.merge_size**2
        self.projection = TowerLinear(size * num_merged, config.output_size, options, bias=False)

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        last = (len(self.blocks),)
        hidden = self._embed(pixels, spec)
        hidden = yield from run_features(self.blocks, hidden, None, last, rows_per_unit)
        num_merged = self.config.merge_size**2

        def merge(states: Tensor) -> Tensor:
            return self.projection(self.last_norm(states).view(len(states) // num_merged, -1))

        return (yield from run_squares(merge, hidden, num_merged, rows_per_unit))

    def _embed(self, pixels: Tensor, spec: ImageSpec) -> Tensor:
        """The states before the first layer: [patches, D], square by square."""
        config = self.config
        count = len(pixels) // config.patch_size  # patches of an edge
        if pixels.shape[0] != pixels.shape[1] or not count or count % config.merge_size:
            raise ValueError(
                f"an image of shape {list(pixels.shape)} was given to a tower that takes squares "
                f"of a multiple of {config.merge_size} patches of {config.patch_size} pixels; "
                "preprocessor_config.json must state such a size"
            )
        whole = count * config.patch_size  # what is left at the ends belongs to no patch
        cut = pixels[:whole, :whole].contiguous()
        patches = split_patches(cut, config.patch_size, config.merge_size)
        rows, columns = patch_places(count, count, config.merge_size, pixels.device)
        places = _table_places(count, self.edge).to(pixels.device)
        at = places[rows] * self.edge + places[columns]
        return self.patch_embed.embed(patches, spec) + F.embedding(at, self.position_embedding)


def _table_places(count: int, edge: int) -> Tensor:
    """[count] int64: the place of each patch of an axis among the `edge` places of the table.

    The places divide the axis evenly. The results are those of transformers, which computes in
    float32, so the place of a patch can be one less than the exact one.
    """
    begins = torch.arange(1 / edge, 1.0, 1 / edge, dtype=torch.float32)
    step = 1.0 / torch.tensor(count)
    at = (torch.arange(count, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
    return torch.bucketize(at, begins, right=True)
