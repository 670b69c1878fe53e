"""Tables of which a step reads the rows at the positions of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.model_config import QueryTemperature
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.step_tensors import RopeRows, TableRows
from ostinato.ops.rope import Rope, rope_tables

__all__ = (
    "GridRotaryEmbedding",
    "RotaryEmbedding",
    "TemperatureTable",
)


class RotaryEmbedding(nn.Module):
    """The rows of the cosine and sine tables at a step's positions."""

    cos: Tensor  # [max_model_len + num_extra, rotary_dim / 2] float32
    sin: Tensor

    def __init__(self, rope: Rope, options: BuildOptions, *, num_extra: int = 0) -> None:
        super().__init__()
        cos, sin = rope_tables(rope, options.max_model_len, options.device, num_extra=num_extra)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: Tensor) -> RopeRows:
        """[T] int64 -> cos, sin [T, rotary_dim / 2] float32."""
        return RopeRows(F.embedding(positions, self.cos), F.embedding(positions, self.sin))


class GridRotaryEmbedding(RotaryEmbedding):
    """Rotary tables for positions on several axes (M-RoPE, arXiv:2409.12191).

    Each pair of rotated elements has an axis, and is rotated by the position on this axis.

    Args:
        rope: the rotary embedding.
        axes: the axis of each pair of elements.
        options: dtype and device.
        num_extra: positions beyond the longest context. Positions in time can lie there.
    """

    axes: Tensor  # [rotary_dim / 2] int64
    pairs: Tensor  # [rotary_dim / 2] int64: 0, 1, 2, ...

    def __init__(
        self, rope: Rope, axes: tuple[int, ...], options: BuildOptions, *, num_extra: int = 0
    ) -> None:
        super().__init__(rope, options, num_extra=num_extra)
        num_pairs = self.cos.shape[1]
        if len(axes) != num_pairs:
            raise ValueError(
                f"config.json: mrope_section names the axes of {len(axes)} pairs of elements, and "
                f"{num_pairs} pairs are rotated"
            )
        device = options.device
        self.register_buffer("axes", torch.tensor(axes, device=device), persistent=False)
        self.register_buffer("pairs", torch.arange(num_pairs, device=device), persistent=False)

    def forward(self, positions: Tensor) -> RopeRows:
        """[T, 3] int64 -> cos, sin [T, rotary_dim / 2] float32."""
        num_pairs = self.cos.shape[1]
        places = positions.index_select(1, self.axes) * num_pairs + self.pairs
        cos = F.embedding(places, self.cos.view(-1, 1)).squeeze(2)
        return RopeRows(cos, F.embedding(places, self.sin.view(-1, 1)).squeeze(2))


class TemperatureTable(nn.Module):
    """The factors of queries at a step's positions (`QueryTemperature`)."""

    factors: Tensor  # [max_model_len, 1] float32

    def __init__(self, temperature: QueryTemperature, options: BuildOptions) -> None:
        super().__init__()
        shape = (options.max_model_len, 1)
        if options.device.type == "meta":
            factors = torch.empty(shape, dtype=torch.float32, device=options.device)
        else:
            positions = torch.arange(shape[0], dtype=torch.float32, device=options.device)
            steps = torch.floor((positions + temperature.offset) / temperature.floor)
            factors = (torch.log1p(steps) * temperature.scale + 1.0).view(shape)
        self.register_buffer("factors", factors, persistent=False)

    def forward(self, positions: Tensor) -> TableRows:
        """[T] int64 -> [T, 1] float32."""
        return TableRows(F.embedding(positions, self.factors))
