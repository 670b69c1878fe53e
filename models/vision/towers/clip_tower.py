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
from ostinato.models.media.tower_layers import (
    TowerBlock,
    TowerLinear,
    run_block,
    tower_options,
    units,
)
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.patch_grid import split_patches
from ostinato.models.vision.towers.patch_layers import PatchEmbedding
from ostinato.models.vision.towers.vision_tower import VisionTower
from ostinato.ops.activation import activate

__all__ = ("SIGLIP_NAMES", "ClipTower", "FixedTower")

SIGLIP_NAMES = (
    ("vision.blocks.", "vision_tower.encoder.layers."),
    ("vision.patch_embed.", "vision_tower.embeddings.patch_embedding."),
    ("vision.position_embedding", "vision_tower.embeddings.position_embedding.weight"),
    ("vision.final_norm.", "vision_tower.post_layernorm."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.", ".self_attn."),
    (".self_attn.proj.", ".self_attn.out_proj."),
)
"""(our name, the name in checkpoints) of the tensors of a `FixedTower`."""


class _Projector(nn.Module):
    """Two matrices with an activation between them."""

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__()
        self.activation = config.projector_activation
        bias = config.projector_bias
        size = config.hidden_size * len(config.feature_layers)
        self.linear_1 = TowerLinear(size, config.output_size, options, bias=bias)
        self.linear_2 = TowerLinear(config.output_size, config.output_size, options, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        """[T, hidden_size * states] -> [T, output_size]."""
        return self.linear_2(activate(self.linear_1(features), self.activation))


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

    def compute_states(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int, wanted: Sequence[int]
    ) -> Generator[None, None, list[Tensor]]:
        """Compute the states of an image, in units, as `encode` does.

        Args:
            pixels: as `encode` takes them.
            spec: how the colours are scaled.
            rows_per_unit: patches of a unit.
            wanted: numbers of layers. 0 = the states before the first layer.

        Returns:
            For each wanted layer its result, [positions, D].
        """
        hidden = self._embed(pixels, spec)
        states = {0: hidden.clone()} if 0 in wanted else {}
        yield
        for number, block in enumerate(self.blocks, 1):
            assert isinstance(block, TowerBlock), "the list has blocks only"
            yield from run_block(block, hidden, None, rows_per_unit)
            if number in wanted:
                states[number] = hidden.clone()
        return [states[number] for number in wanted]

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
        self.projector = _Projector(config, tower_options(options))

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        wanted = self.config.feature_layers
        states = yield from self.compute_states(pixels, spec, rows_per_unit, wanted)
        features = torch.cat(states, dim=1)
        if self.config.drops_first:
            features = features[1:]
        parts: list[Tensor] = []
        for rows in units(len(features), rows_per_unit):
            parts.append(self.projector(features[rows]))
            yield
        return torch.cat(parts)
