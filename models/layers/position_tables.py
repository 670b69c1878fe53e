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
    "RotaryEmbedding",
    "TemperatureTable",
)


class RotaryEmbedding(nn.Module):
    """The rows of the cosine and sine tables at a step's positions."""

    cos: Tensor  # [max_model_len, rotary_dim / 2] float32
    sin: Tensor

    def __init__(self, rope: Rope, options: BuildOptions) -> None:
        super().__init__()
        cos, sin = rope_tables(rope, options.max_model_len, options.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: Tensor) -> RopeRows:
        """[T] int64 -> cos, sin [T, rotary_dim / 2] float32."""
        return RopeRows(F.embedding(positions, self.cos), F.embedding(positions, self.sin))


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
            steps = torch.floor((positions + 1.0) / temperature.floor)
            factors = (torch.log1p(steps) * temperature.scale + 1.0).view(shape)
        self.register_buffer("factors", factors, persistent=False)

    def forward(self, positions: Tensor) -> TableRows:
        """[T] int64 -> [T, 1] float32."""
        return TableRows(F.embedding(positions, self.factors))
