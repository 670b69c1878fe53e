"""The tower of Qwen3-VL (arXiv:2511.21631)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.vision_config import VisionConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.media.tower_layers import tower_options, units
from ostinato.models.vision.patch_grid import interpolation_taps
from ostinato.models.vision.towers.patch_layers import Merger
from ostinato.models.vision.towers.qwen_tower import QwenTower

__all__ = ("Qwen3Tower",)


class Qwen3Tower(QwenTower):
    """Adds an interpolated table of positions, and merged results of earlier layers (DeepStack)."""

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        options = tower_options(options)
        self.position_embedding = options.empty(config.num_positions, config.hidden_size)
        self.deep_mergers = nn.ModuleList(
            Merger(config, options, norm_of_square=True) for _ in config.deep_layers
        )

    def _add_positions(
        self, hidden: Tensor, rows: Tensor, columns: Tensor, size: tuple[int, int], most: int
    ) -> Iterator[None]:
        edge = int(self.config.num_positions**0.5)
        places, weights = interpolation_taps(rows, columns, size, edge)
        for some in units(len(hidden), most):
            entries = F.embedding(places[some], self.position_embedding)
            positions = (entries * weights[some].unsqueeze(2)).sum(1)
            hidden[some] += positions.to(hidden.dtype)
            yield

    def _merger_after(self, layer: int) -> Merger | None:
        if layer not in self.config.deep_layers:
            return None
        merger = self.deep_mergers[self.config.deep_layers.index(layer)]
        assert isinstance(merger, Merger), "the list has mergers only"
        return merger
