"""Builds the vision tower of a model."""

from __future__ import annotations

from ostinato.models.config.vision_config import TowerKind, VisionConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.vision.towers.clip_tower import ClipTower
from ostinato.models.vision.towers.gemma3_tower import Gemma3Tower
from ostinato.models.vision.towers.idefics_tower import IdeficsTower
from ostinato.models.vision.towers.intern_tower import InternTower
from ostinato.models.vision.towers.pixtral_tower import PixtralTower
from ostinato.models.vision.towers.qwen3_tower import Qwen3Tower
from ostinato.models.vision.towers.qwen_tower import QwenTower
from ostinato.models.vision.towers.vision_tower import VisionTower

__all__ = ("build_tower",)

_TOWERS: dict[
    TowerKind,
    type[ClipTower | Gemma3Tower | IdeficsTower | InternTower | PixtralTower | QwenTower],
] = {
    TowerKind.clip: ClipTower,
    TowerKind.siglip: ClipTower,
    TowerKind.gemma3: Gemma3Tower,
    TowerKind.qwen2: QwenTower,
    TowerKind.qwen2_5: QwenTower,
    TowerKind.qwen3: Qwen3Tower,
    TowerKind.pixtral: PixtralTower,
    TowerKind.mistral3: PixtralTower,
    TowerKind.internvl: InternTower,
    TowerKind.idefics3: IdeficsTower,
}


def build_tower(config: VisionConfig, options: BuildOptions) -> VisionTower:
    """The tower with unset weights.

    Args:
        config: its hyperparameters.
        options: dtype and device. Every rank holds the whole tower.
    """
    return _TOWERS[config.kind](config, options)
