"""The tower of InternVL (arXiv:2312.14238, 2404.16821): InternViT, and a merger of patches."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn

from ostinato.models.config.vision_config import VisionConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.norm_layers import LayerNorm, RMSNorm
from ostinato.models.media.tower_layers import (
    Rows,
    TowerBlock,
    TowerLinear,
    tower_options,
)
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.patch_grid import patch_places, split_patches
from ostinato.models.vision.towers.patch_layers import PatchEmbedding, run_features, run_squares
from ostinato.models.vision.towers.vision_tower import VisionTower
from ostinato.ops.activation import activate

__all__ = ("InternTower",)

# No config states these.
_QK_NORM_EPS = 1e-6
_PROJECTOR_EPS = 1e-5


class _ScaledBlock(TowerBlock):
    """A block whose two results are multiplied by vectors before they are added to its input."""

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__(
            config, options, has_rms_norms=config.has_rms_norms, qkv_bias=config.qkv_bias
        )
        size = config.hidden_size
        self.query_norm = RMSNorm(size, _QK_NORM_EPS, options) if config.qk_norm else None
        self.key_norm = RMSNorm(size, _QK_NORM_EPS, options) if config.qk_norm else None
        self.attention_scale = options.empty(size)
        self.mlp_scale = options.empty(size)

    def project(self, hidden: Tensor, rope: Rows | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(hidden, rope)
        if self.query_norm is not None and self.key_norm is not None:
            q = self.query_norm(q.flatten(1)).view(q.shape)
            k = self.key_norm(k.flatten(1)).view(k.shape)
        return q, k, v

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention_scale * self.attn.proj(attended)
        return hidden + self.mlp_scale * self.mlp(self.norm2(hidden))


class _Projector(nn.Module):
    """The patches of each square side by side, a norm, and two matrices."""

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__()
        self.num_merged = config.merge_size**2
        self.activation = config.projector_activation
        size = config.hidden_size * self.num_merged
        self.norm = LayerNorm(size, _PROJECTOR_EPS, options)
        self.linear_1 = TowerLinear(size, config.output_size, options, bias=True)
        self.linear_2 = TowerLinear(config.output_size, config.output_size, options, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[squares * num_merged, D] -> [squares, output_size]."""
        merged = self.norm(hidden.reshape(len(hidden) // self.num_merged, -1))
        return self.linear_2(activate(self.linear_1(merged), self.activation))


class InternTower(VisionTower):
    """A vision transformer with a class token. All images have one size.

    Layers after the one whose result is read are left out.
    """

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__()
        options = tower_options(options)
        self.config = config
        size = config.hidden_size
        self.edge = config.image_size // config.patch_size  # patches of an image's edge
        self.patch_embed = PatchEmbedding(config, options, bias=True)
        self.class_embedding = options.empty(1, 1, size)
        self.position_embedding: nn.Parameter | None = None
        if config.has_positions:
            self.position_embedding = options.empty(1, 1 + self.edge**2, size)
        self.blocks = nn.ModuleList(
            _ScaledBlock(config, options) for _ in range(config.num_used_layers)
        )
        self.last_norm = LayerNorm(size, config.norm_eps, options) if config.has_last_norm else None
        self.projector = _Projector(config, options)

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        last = (len(self.blocks),)
        hidden = self._embed(pixels, spec)
        hidden = yield from run_features(self.blocks, hidden, None, last, rows_per_unit)
        # The norm is computed for each patch, so the class token may be dropped before it.
        hidden = hidden[1:]
        if self.last_norm is not None:
            hidden = self.last_norm(hidden)
            yield
        num_merged = self.projector.num_merged
        return (yield from run_squares(self.projector, hidden, num_merged, rows_per_unit))

    def _embed(self, pixels: Tensor, spec: ImageSpec) -> Tensor:
        """The states before the first layer: [1 + patches, D], the patches square by square."""
        config, edge = self.config, self.config.image_size
        if pixels.shape != (edge, edge, 3):
            raise ValueError(
                f"an image of shape {list(pixels.shape)} was given to a tower that takes images of "
                f"{[edge, edge, 3]}; preprocessor_config.json must state the size of vision_config"
            )
        patches = split_patches(pixels, config.patch_size, config.merge_size)
        hidden = torch.cat((self.class_embedding[0], self.patch_embed.embed(patches, spec)))
        if self.position_embedding is None:
            return hidden
        rows, columns = patch_places(self.edge, self.edge, config.merge_size, pixels.device)
        places = torch.cat((rows.new_zeros(1), 1 + rows * self.edge + columns))
        return hidden + self.position_embedding[0, places]
