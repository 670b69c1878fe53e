"""Random steps of the recurrent ops, and comparisons of kernels with the references."""

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
    "DECODES",
    "MIXED",
    "NUM_ROWS",
    "NUM_SLOTS",
    "OPS",
    "Op",
    "Problem",
    "Result",
    "SequenceStep",
    "check",
    "check_chunks",
    "delta_rule",
    "sequence_steps",
    "short_conv",
    "state_space",
)

Op = Callable[..., Tensor]
REFERENCES: dict[str, Op] = {
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
        return self.holds(slot, other, slot)

    def holds(self, slot: int, other: Result, other_slot: int) -> bool:
        """Whether a slot has all bits of another result's slot."""
        conv = torch.equal(self.conv_state[slot], other.conv_state[other_slot])
        return conv and torch.equal(self.state[slot], other.state[other_slot])


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

    def to(self, device: torch.device) -> Problem:
        """The same call on a device."""
        moved = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }
        return replace(self, arguments=moved)

    def step(
        self, sequences: Sequence[SequenceStep], rows: Tensor | slice | None = None
    ) -> Problem:
        """The same call for other sequences, whose tokens are these rows."""
        device = self["conv_state"].device
        starts = torch.tensor([0, *(each.tokens for each in sequences)]).cumsum(0)
        slots = torch.tensor([each.slots for each in sequences], dtype=torch.int32).view(-1, 4)
        changes: dict[str, object] = {
            "query_start_loc": starts.int().to(device),
            "state_slots": slots.to(device),
        }
        if rows is not None:
            changes |= {name: self[name][rows] for name in self.per_row}
        return self.having(**changes)

    def run(self, function: Op | None = None) -> Result:
        """Call a kernel, by default the reference, with copies of the states."""
        changed = {name: self[name].clone() for name in ("conv_state", "state")}
        arguments = {**self.arguments, **changed}
        run = REFERENCES[self.op] if function is None else function
        out = run(*(arguments[name] for name in self.names))
        return Result(out, **changed)

    def after(self, result: Result) -> Problem:
        """The same call on the states that another one left."""
        return self.having(conv_state=result.conv_state, state=result.state)


class _Random:
    """Draws the arguments of a call."""

    def __init__(self, seed: int, dtype: torch.dtype, gap: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype, self._gap = dtype, gap

    def __call__(
        self, *shape: int, mean: float = 0, scale: float = 1, is_float: bool = False
    ) -> Tensor:
        values = mean + scale * torch.randn(*shape, generator=self._generator)
        return values if is_float else values.to(self._dtype)

    def rows(self, num_rows: int, columns: int) -> Tensor:
        """Rows whose stride is larger than they are."""
        return self(num_rows, columns + self._gap)[:, :columns]

    def slots(self, num_slots: int, *shape: int, is_float: bool = False) -> Tensor:
        """States of all slots. Slot 0 is never read, so it has no numbers."""
        states = self(num_slots, *shape, is_float=is_float)
        states[0] = torch.nan
        return states


def delta_rule(
    num_rows: int,
    num_slots: int,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (16, 32),
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    gap: int = 3,
) -> Problem:
    """A call of `gated_delta_rule` without sequences.

    Args:
        num_rows: tokens.
        num_slots: slots for states.
        heads: (Hk, Hv).
        dims: (K, V).
        width: of the convolution.
        dtype: of activations.
        seed: of the random numbers.
        gap: elements between the rows of tokens.
    """
    draw, (k_heads, v_heads), (k_dim, v_dim) = _Random(seed, dtype, gap), heads, dims
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    arguments = {
        "qkvz": draw.rows(num_rows, channels + v_heads * v_dim),
        "gates": draw.rows(num_rows, 2 * v_heads),
        "conv_weight": draw(channels, width, scale=0.5),
        "a_log": draw(v_heads, is_float=True),
        "dt_bias": draw(v_heads, is_float=True),
        "norm_weight": draw(v_dim, mean=1, scale=0.1),
        "conv_state": draw.slots(num_slots, width - 1, channels),
        "state": draw.slots(num_slots, v_heads, k_dim, v_dim, is_float=True),
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
    gap: int = 3,
) -> Problem:
    """A call of `gated_short_conv` without sequences; see `delta_rule`."""
    draw = _Random(seed, dtype, gap)
    arguments = {
        "bcx": draw.rows(num_rows, 3 * channels),
        "conv_weight": draw(channels, width, scale=0.5),
        "conv_bias": draw(channels) if has_bias else None,
        "conv_state": draw.slots(num_slots, width - 1, channels),
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
    limits: tuple[float, float] = (0.01, float("inf")),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    gap: int = 3,
) -> Problem:
    """A call of `state_space` without sequences; see `delta_rule`. heads (H, G), dims (P, N)."""
    draw, (num_heads, groups), (size, states) = _Random(seed, dtype, gap), heads, dims
    inner = num_heads * size
    channels = inner + 2 * groups * states
    arguments = {
        "projected": draw.rows(num_rows, inner + channels + num_heads),
        "conv_weight": draw(channels, width, scale=0.5),
        "conv_bias": draw(channels) if has_bias else None,
        **{name: draw(num_heads, is_float=True) for name in ("a_log", "dt_bias", "skip")},
        "norm_weight": draw(inner, mean=1, scale=0.1),
        "conv_state": draw.slots(num_slots, width - 1, channels),
        "state": draw.slots(num_slots, num_heads, size, states, is_float=True),
        "num_groups": groups,
        "norm_eps": 1e-5,
        "least_step": limits[0],
        "largest_step": limits[1],
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


NUM_ROWS, NUM_SLOTS = 80, 12
MIXED = [
    SequenceStep(5, 0, 3),
    SequenceStep(0, 0, 0),
    SequenceStep(1, 4, 4),
    SequenceStep(22, 2, 5, 6, 18),
    SequenceStep(1, 2, 7),
    SequenceStep(2, 2, 8, 9, 1),
    SequenceStep(17, 10, 10),
    SequenceStep(0, 1, 1),
]
"""A step for `NUM_SLOTS` slots.

The sequences begin, continue in place, continue elsewhere and share a slot that they read. Two have
checkpoints, one of which comes before the convolution has only new inputs. Two are absent.
"""

DECODES = [SequenceStep(1, 0, slot) for slot in range(1, len(MIXED) + 1)]
"""As many sequences as in `MIXED`, with one token each."""

_PADDING = 3


def check(
    problem: Problem, function: Op, tolerance: float, sequences: Sequence[SequenceStep] = MIXED
) -> None:
    """Compare a kernel's results and all slots but slot 0 with those of the reference.

    Args:
        problem: has `NUM_ROWS` rows and `NUM_SLOTS` slots, on any device.
        function: the kernel.
        tolerance: absolute and relative.
        sequences: of the step. Rows of padding follow.
    """
    num_rows = sum(each.tokens for each in sequences) + _PADDING
    step = problem.step(sequences, slice(0, num_rows))
    found, expected = step.run(function), step.to(torch.device("cpu")).run()
    assert found.out.is_contiguous()
    assert (found.out[-_PADDING:] == 0).all(), "rows of padding must be zero"
    _assert_within(found.out, expected.out, tolerance)
    written = {slot for each in sequences if each.tokens for slot in each.slots[1:3]}
    kept = [slot for slot in range(NUM_SLOTS) if slot not in written]
    for name in ("conv_state", "state"):
        one, other = getattr(found, name), getattr(expected, name)
        _assert_within(one[1:], other[1:], tolerance)
        assert torch.equal(one[kept].nan_to_num(), problem[name][kept].nan_to_num())


def _assert_within(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare tensors on any devices."""
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


def check_chunks(problem: Problem, function: Op, chunks: Sequence[int]) -> None:
    """A sequence has the same bits as a whole, in chunks, and beside others."""
    total = sum(chunks)
    whole = problem.step([SequenceStep(total, 2, 3, 4, chunks[0])], slice(0, total)).run(function)
    begin, current, read = 0, problem, 2
    for size in chunks:
        rows = slice(begin, begin + size)
        part = current.step([SequenceStep(size, read, 5)], rows).run(function)
        assert torch.equal(part.out, whole.out[rows])
        if begin == 0:
            assert part.holds(5, whole, 4)
        begin, current, read = begin + size, problem.after(part), 5
        if begin == total:
            assert part.holds(5, whole, 3)
    rows = torch.arange(NUM_ROWS)
    order = torch.cat((rows[-7:], rows[:total], rows[-4:]))
    among = problem.step(
        [SequenceStep(7, 0, 6), SequenceStep(total, 2, 3), SequenceStep(4, 8, 8)], order
    ).run(function)
    assert torch.equal(among.out[7 : 7 + total], whole.out)
    assert among.holds(3, whole, 3)
