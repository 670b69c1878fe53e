"""The tower of Gemma 3 (arXiv:2503.19786): SigLIP, means of squares of patches, and one matrix."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from ostinato.models.config.vision_config import VisionConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.norm_layers import LayerNorm, RMSNorm
from ostinato.models.media.tower_layers import TowerLinear, tower_options
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.towers.clip_tower import FixedTower
from ostinato.models.vision.towers.patch_layers import run_squares

__all__ = ("Gemma3Tower",)


class Gemma3Tower(FixedTower):
    """SigLIP (arXiv:2303.15343) with its last norm; each square of patches gives an embedding."""

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        options = tower_options(options)
        self.final_norm = LayerNorm(config.hidden_size, config.norm_eps, options)
        self.embedding_norm = RMSNorm(config.hidden_size, config.norm_eps, options, plus_one=True)
        self.projection = TowerLinear(config.hidden_size, config.output_size, options, bias=False)

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        last = len(self.blocks)
        hidden = yield from self.compute_features(pixels, spec, rows_per_unit, (last,))
        edge = self.config.merge_size
        columns = self.config.image_size // self.config.patch_size // edge
        states = self.final_norm(hidden)
        means = states.view(columns, edge, columns, edge, -1).mean((1, 3)).flatten(0, 1)
        yield

        def project(some: Tensor) -> Tensor:
            return self.projection(self.embedding_norm(some))

        return (yield from run_squares(project, means, 1, rows_per_unit))
