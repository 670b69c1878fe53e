"""The recurrent mixers that some layers of a model have in place of attention, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ostinato.models.sharding import WHOLE, Shard

__all__ = ("DeltaSpec", "RecurrentSpec", "ShortConvSpec", "StateShapes", "StateSpaceSpec")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShapes:
    """What a recurrent layer keeps for a sequence."""

    conv: tuple[int, int]  # the last inputs of the convolution: (width - 1, channels)
    state: tuple[int, ...] = ()  # float32; empty = only the inputs of the convolution are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A gated delta net (arXiv:2412.06464), as in Qwen3-Next."""

    layers: tuple[bool, ...]  # of the whole model: whether a layer is recurrent
    num_k_heads: int  # of queries and of keys
    num_v_heads: int
    k_dim: int  # of a head
    v_dim: int
    conv_width: int

    @property
    def divided(self) -> dict[str, int]:
        """The dimensions that are divided evenly among tensor-parallel ranks, by name."""
        return {
            "linear_num_key_heads": self.num_k_heads,
            "linear_num_value_heads": self.num_v_heads,
        }

    @property
    def state_operations(self) -> int:
        """Operations on one layer's state by a token: its decay, a read, an update, the output."""
        return 7 * math.prod(self.shapes().state)

    def step_bytes(self, itemsize: int, shard: Shard, *, is_cpu: bool) -> int:
        """Bytes of one token between the projections of a layer, on one rank.

        Args:
            itemsize: bytes of one activation.
            shard: the rank.
            is_cpu: the CPU kernels are used. Those of a GPU also have float32 results between them.
        """
        shapes = self.shapes(shard)
        heads, channels = shapes.state[0], shapes.conv[1]
        values = heads * self.v_dim
        floats = 0 if is_cpu else channels + values + 2 * heads
        return (channels + 2 * values + 2 * heads) * itemsize + 4 * floats

    def shapes(self, shard: Shard = WHOLE) -> StateShapes:
        """What a layer keeps for a sequence on one rank."""
        keys = shard.span(self.num_k_heads, "linear_num_key_heads").size
        values = shard.span(self.num_v_heads, "linear_num_value_heads").size
        channels = 2 * keys * self.k_dim + values * self.v_dim
        return StateShapes(
            conv=(self.conv_width - 1, channels), state=(values, self.k_dim, self.v_dim)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated short convolution, as in LFM2 (arXiv:2511.23404)."""

    layers: tuple[bool, ...]  # of the whole model: whether a layer is recurrent
    channels: int
    conv_width: int
    has_bias: bool  # of the convolution and of both projections

    @property
    def divided(self) -> dict[str, int]:
        """The dimensions that are divided evenly among tensor-parallel ranks, by name."""
        return {"hidden_size": self.channels}

    @property
    def state_operations(self) -> int:
        """Operations on one layer's state by a token: there is no state."""
        return 0

    def step_bytes(self, itemsize: int, shard: Shard, *, is_cpu: bool) -> int:
        """As `DeltaSpec.step_bytes`. All devices have only the projection and the result."""
        return 4 * self.shapes(shard).conv[1] * itemsize

    def shapes(self, shard: Shard = WHOLE) -> StateShapes:
        """What a layer keeps for a sequence on one rank."""
        channels = shard.span(self.channels, "hidden_size").size
        return StateShapes(conv=(self.conv_width - 1, channels))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceSpec:
    """A Mamba-2 mixer (arXiv:2405.21060)."""

    layers: tuple[bool, ...]  # of the whole model: whether a layer is recurrent
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    has_conv_bias: bool
    has_bias: bool  # of both projections
    step_limits: tuple[float, float]  # the smallest and the largest time step
    norm_eps: float  # of the norm before the output projection

    @property
    def divided(self) -> dict[str, int]:
        """The dimensions that are divided evenly among tensor-parallel ranks, by name."""
        return {"mamba_n_heads": self.num_heads, "mamba_n_groups": self.num_groups}

    @property
    def state_operations(self) -> int:
        """Operations on one layer's state by a token: its decay, an update, the output."""
        return 5 * math.prod(self.shapes().state)

    def step_bytes(self, itemsize: int, shard: Shard, *, is_cpu: bool) -> int:
        """See `DeltaSpec.step_bytes`."""
        shapes = self.shapes(shard)
        heads, channels = shapes.state[0], shapes.conv[1]
        inner = heads * self.head_dim
        floats = 0 if is_cpu else channels + 2 * heads + inner
        return (channels + 2 * inner + heads) * itemsize + 4 * floats

    def shapes(self, shard: Shard = WHOLE) -> StateShapes:
        """What a layer keeps for a sequence on one rank."""
        heads = shard.span(self.num_heads, "mamba_n_heads").size
        groups = shard.span(self.num_groups, "mamba_n_groups").size
        channels = heads * self.head_dim + 2 * groups * self.state_size
        return StateShapes(
            conv=(self.conv_width - 1, channels), state=(heads, self.head_dim, self.state_size)
        )


RecurrentSpec = DeltaSpec | ShortConvSpec | StateSpaceSpec
"""The recurrent mixer of a model; a model has at most one kind."""
