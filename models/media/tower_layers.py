"""The layers that towers for images and audio share, and how their work is divided into units.

A tower's matrices are whole on every rank, have the dtype of the model, and take no adapters. All
patches of an image see each other, or those of their window. All positions of audio see each other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.layers.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.models.layers.norm_layers import LayerNorm, RMSNorm
from ostinato.models.sharding import WHOLE
from ostinato.models.weight_methods.weight_method import MatrixRole
from ostinato.ops.activation import activate
from ostinato.ops.rope import rotate_heads

__all__ = (
    "Rows",
    "TowerBlock",
    "TowerLinear",
    "TowerSizes",
    "run_block",
    "run_windows",
    "tower_options",
    "units",
)

# A unit of attention has at most this many times `rows_per_unit` pairs of a query and a key.
_KEYS_PER_ROW = 40_000

Rows = tuple[Tensor, Tensor]
"""Cosines and sines of patches, [patches, head_dim / 2] float32 each."""


def tower_options(options: BuildOptions) -> BuildOptions:
    """The options of a tower in a model with these options."""
    return replace(options, shard=WHOLE, adapters=None)


def units(total: int, most: int) -> Iterator[slice]:
    """Divide rows into ranges of at most `most` rows."""
    for start in range(0, total, most):
        yield slice(start, min(start + most, total))


class TowerSizes(Protocol):
    """The hyperparameters of a tower's blocks."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def is_gated(self) -> bool:
        """Whether the MLPs are gated, and the norms are RMS norms."""
        ...

    @property
    def has_biases(self) -> bool:
        """Whether the matrices have biases."""
        ...


class TowerLinear(Linear):
    """A matrix of a tower."""

    role = MatrixRole.vision
    takes_adapters = False


class _TowerMergedLinear(MergedLinear):
    role = MatrixRole.vision
    takes_adapters = False


class _Attention(nn.Module):
    def __init__(self, config: TowerSizes, options: BuildOptions, *, qkv_bias: bool) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.has_biases
        self.qkv = _TowerMergedLinear(size, (size, size, size), options, bias=bias and qkv_bias)
        self.proj = TowerLinear(size, size, options, bias=bias)


class _MLP(nn.Module):
    def __init__(self, config: TowerSizes, options: BuildOptions) -> None:
        super().__init__()
        self.activation, bias = config.activation, config.has_biases
        self.fc1 = TowerLinear(config.hidden_size, config.intermediate_size, options, bias=bias)
        self.fc2 = TowerLinear(config.intermediate_size, config.hidden_size, options, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.fc2(activate(self.fc1(x), self.activation), residual)


class _GatedMLP(nn.Module):
    def __init__(self, config: TowerSizes, options: BuildOptions) -> None:
        super().__init__()
        self.activation, bias = config.activation, config.has_biases
        sizes = (config.intermediate_size, config.intermediate_size)
        self.gate_up_proj = _TowerMergedLinear(config.hidden_size, sizes, options, bias=bias)
        self.down_proj = TowerLinear(
            config.intermediate_size, config.hidden_size, options, bias=bias
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down_proj(self.gate_up_proj(x, activation=self.activation), residual)


class TowerBlock(nn.Module):
    """Attention in both directions and an MLP, each after a norm and added to its input.

    Args:
        config: the sizes.
        options: dtype and device.
        has_rms_norms: the norms are RMS norms; None = if the MLP is gated.
        qkv_bias: queries, keys and values have biases.
    """

    def __init__(
        self,
        config: TowerSizes,
        options: BuildOptions,
        *,
        has_rms_norms: bool | None = None,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        has_rms_norms = config.is_gated if has_rms_norms is None else has_rms_norms
        norm = RMSNorm if has_rms_norms else LayerNorm
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.norm1 = norm(config.hidden_size, config.norm_eps, options)
        self.attn = _Attention(config, options, qkv_bias=qkv_bias)
        self.norm2 = norm(config.hidden_size, config.norm_eps, options)
        self.mlp = (_GatedMLP if config.is_gated else _MLP)(config, options)

    def project(self, hidden: Tensor, rope: Rows | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of some patches: [T, D] -> three times [T, H, d]."""
        count = self.num_heads
        heads = self.attn.qkv(self.norm1(hidden)).view(-1, 3 * count, self.head_dim)
        q, k, v = heads.split((count, count, count), 1)
        if rope is not None:
            turned = rotate_heads(heads[:, : 2 * count], *rope, count)
            q, k = turned.split((count, count), 1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention in each of W windows: [W, Tq, H, d], [W, Tk, H, d] -> [W * Tq, H * d]."""
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """The rest of the block: attended [T, D] and the block's input [T, D] -> [T, D]."""
        hidden = self.attn.proj(attended, hidden)
        return self.mlp(self.norm2(hidden), hidden)


def run_block(
    block: TowerBlock, hidden: Tensor, rope: Rows | None, rows_per_unit: int
) -> Generator[None, None, None]:
    """Replace the hidden states [T, D] by the result of a block whose patches see the whole image.

    First the queries, keys and values of all patches are computed, then attention, then the rest.
    A unit of attention has some heads, and all patches if there are few: with fewer patches, the
    kernel would arrange the same keys and values more often.
    """
    num_rows = len(hidden)
    shape = (3, num_rows, block.num_heads, block.head_dim)
    stacked = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
    for rows in units(len(hidden), rows_per_unit):
        own = None if rope is None else (rope[0][rows], rope[1][rows])
        for place, value in zip(stacked, block.project(hidden[rows], own), strict=True):
            place[rows] = value
        yield
    q, k, v = stacked
    attended = torch.empty_like(hidden).view(shape[1:])
    most_rows = min(num_rows, max(rows_per_unit, rows_per_unit * _KEYS_PER_ROW // num_rows))
    most_heads = max(1, rows_per_unit * _KEYS_PER_ROW // (num_rows * most_rows))
    for heads in units(block.num_heads, most_heads):
        for rows in units(num_rows, most_rows):
            some = block.attend(q[None, rows, heads], k[None, :, heads], v[None, :, heads])
            attended[rows, heads] = some.view(-1, heads.stop - heads.start, block.head_dim)
            yield
    for rows in units(num_rows, rows_per_unit):
        hidden[rows] = block.finish(attended[rows].flatten(1), hidden[rows])
        yield


def run_windows(
    block: TowerBlock,
    hidden: Tensor,
    rope: Rows,
    windows: Sequence[tuple[int, int]],
    rows_per_unit: int,
) -> Generator[None, None, None]:
    """Replace the hidden states [T, D] by the result of a block whose patches see their window.

    A unit has one window or more.

    Args:
        block: the block.
        hidden: the hidden states, in the order of the windows.
        rope: cosines and sines, in the same order.
        windows: (number of windows, patches of each of them).
        rows_per_unit: patches of a unit.
    """
    first = 0
    for count, size in windows:
        for some in units(count, max(1, rows_per_unit // size)):
            rows = slice(first + some.start * size, first + some.stop * size)
            own = hidden[rows]
            parts = block.project(own, (rope[0][rows], rope[1][rows]))
            q, k, v = (each.unflatten(0, (-1, size)) for each in parts)
            hidden[rows] = block.finish(block.attend(q, k, v), own)
            yield
        first += count * size
