"""Random steps of the recurrent ops, for tests that compare their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.recurrent.delta_rule import reference_gated_delta_rule
from ostinato.ops.recurrent.short_conv import reference_gated_short_conv
from ostinato.ops.recurrent.state_space import reference_state_space

__all__ = (
    "OPS",
    "Problem",
    "Result",
    "SequenceStep",
    "delta_rule",
    "sequence_steps",
    "short_conv",
    "state_space",
)

REFERENCES: dict[str, Callable[..., Tensor]] = {
    "gated_delta_rule": reference_gated_delta_rule,
    "gated_short_conv": reference_gated_short_conv,
    "state_space": reference_state_space,
}


@dataclass(frozen=True)
class SequenceStep:
    """A sequence of a step: its tokens, and its row of `state_slots`."""

    tokens: int
    read: int
    write: int
    checkpoint: int = 0
    checkpoint_tokens: int = 0

    @property
    def slots(self) -> tuple[int, int, int, int]:
        return self.read, self.write, self.checkpoint, self.checkpoint_tokens


@dataclass(frozen=True)
class Result:
    """What a call returned, and the states after it."""

    out: Tensor
    conv_state: Tensor
    state: Tensor  # [slots, 0] if the op has none

    def equals(self, other: Result) -> bool:
        """Whether all bits are the same, of slots but slot 0."""
        slots = range(1, len(self.conv_state))
        return torch.equal(self.out, other.out) and all(self.keeps(slot, other) for slot in slots)

    def keeps(self, slot: int, other: Result) -> bool:
        """Whether all bits of a slot are the same."""
        conv = torch.equal(self.conv_state[slot], other.conv_state[slot])
        return conv and torch.equal(self.state[slot], other.state[slot])


@dataclass(frozen=True)
class Problem:
    """The arguments of one call, by their names. There is always a `state`."""

    op: str
    arguments: dict[str, object]
    per_row: tuple[str, ...]  # the arguments with a row for each token

    @cached_property
    def names(self) -> list[str]:
        schema = getattr(torch.ops.ostinato, self.op).default._schema
        return [argument.name for argument in schema.arguments]

    def __getitem__(self, name: str) -> Tensor:
        value = self.arguments[name]
        assert isinstance(value, Tensor)
        return value

    def having(self, **changes: object) -> Problem:
        """The same call with other arguments."""
        return replace(self, arguments={**self.arguments, **changes})

    def step(self, sequences: Sequence[SequenceStep], rows: Tensor | None = None) -> Problem:
        """The same call for other sequences, whose tokens are these rows."""
        starts = torch.tensor([0, *(each.tokens for each in sequences)]).cumsum(0)
        slots = torch.tensor([each.slots for each in sequences], dtype=torch.int32).view(-1, 4)
        changes: dict[str, object] = {"query_start_loc": starts.int(), "state_slots": slots}
        if rows is not None:
            changes |= {name: self[name][rows] for name in self.per_row}
        return self.having(**changes)

    def run(self, function: Callable[..., Tensor] | None = None) -> Result:
        """Call a kernel, by default the reference, with copies of the states."""
        changed = {name: self[name].clone() for name in ("conv_state", "state")}
        arguments = {**self.arguments, **changed}
        run = REFERENCES[self.op] if function is None else function
        out = run(*(arguments[name] for name in self.names))
        return Result(out, **changed)

    def after(self, result: Result) -> Problem:
        """The same call on the states that another one left."""
        return self.having(conv_state=result.conv_state, state=result.state)


def _random(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, is_float: bool = False) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        return values if is_float else values.to(dtype)

    return draw


def _rows(draw: Callable[..., Tensor], num_rows: int, columns: int) -> Tensor:
    """Rows whose stride is larger than they are."""
    return draw(num_rows, columns + 3)[:, :columns]


def delta_rule(
    num_rows: int,
    num_slots: int,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (16, 32),
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """A call of `gated_delta_rule` without sequences: heads (Hk, Hv), dims (K, V)."""
    draw, (k_heads, v_heads), (k_dim, v_dim) = _random(seed, dtype), heads, dims
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    arguments = {
        "qkvz": _rows(draw, num_rows, channels + v_heads * v_dim),
        "gates": _rows(draw, num_rows, 2 * v_heads),
        "conv_weight": draw(channels, width),
        "a_log": draw(v_heads, is_float=True),
        "dt_bias": draw(v_heads, is_float=True),
        "norm_weight": draw(v_dim),
        "conv_state": draw(num_slots, width - 1, channels),
        "state": draw(num_slots, v_heads, k_dim, v_dim, is_float=True),
        "num_k_heads": k_heads,
        "norm_eps": 1e-6,
    }
    return Problem("gated_delta_rule", arguments, ("qkvz", "gates"))


def short_conv(
    num_rows: int,
    num_slots: int,
    *,
    channels: int = 64,
    width: int = 3,
    has_bias: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """A call of `gated_short_conv` without sequences."""
    draw = _random(seed, dtype)
    arguments = {
        "bcx": _rows(draw, num_rows, 3 * channels),
        "conv_weight": draw(channels, width),
        "conv_bias": draw(channels) if has_bias else None,
        "conv_state": draw(num_slots, width - 1, channels),
        "state": torch.empty(num_slots, 0),
    }
    return Problem("gated_short_conv", arguments, ("bcx",))


def state_space(
    num_rows: int,
    num_slots: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 16),
    width: int = 4,
    has_bias: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """A call of `state_space` without sequences: heads (H, G), dims (P, N)."""
    draw, (num_heads, groups), (size, states) = _random(seed, dtype), heads, dims
    inner = num_heads * size
    channels = inner + 2 * groups * states
    arguments = {
        "projected": _rows(draw, num_rows, inner + channels + num_heads),
        "conv_weight": draw(channels, width),
        "conv_bias": draw(channels) if has_bias else None,
        **{name: draw(num_heads, is_float=True) for name in ("a_log", "dt_bias", "skip")},
        "norm_weight": draw(inner),
        "conv_state": draw(num_slots, width - 1, channels),
        "state": draw(num_slots, num_heads, size, states, is_float=True),
        "num_groups": groups,
        "norm_eps": 1e-5,
        "least_step": 0.01,
        "largest_step": float("inf"),
    }
    return Problem("state_space", arguments, ("projected",))


OPS: dict[str, Callable[..., Problem]] = {
    "gated_delta_rule": delta_rule,
    "gated_short_conv": short_conv,
    "state_space": state_space,
}

SHARED_SLOT = 1
"""Several sequences read it."""


@st.composite
def sequence_steps(draw: st.DrawFn) -> tuple[list[SequenceStep], int]:
    """Sequences of a step, some without tokens, and the number of slots that they need.

    They begin, continue in place or in another slot, or read a shared slot. Some make a checkpoint,
    also in the slot that they read.
    """
    sequences = []
    next_slot = SHARED_SLOT + 1
    for tokens in draw(
        st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 9, 70]), min_size=1, max_size=5)
    ):
        own, other, third = range(next_slot, next_slot + 3)
        next_slot += 3
        read = draw(st.sampled_from([0, SHARED_SLOT, own]))
        write = draw(st.sampled_from([own, other]))
        step = SequenceStep(tokens, read, write)
        if tokens > 1 and draw(st.booleans()):
            checkpoint = draw(st.sampled_from([third] if write == own else [third, own]))
            after = draw(st.integers(1, tokens - 1))
            step = replace(step, checkpoint=checkpoint, checkpoint_tokens=after)
        sequences.append(step)
    return sequences, next_slot
