"""Made-up steps of recurrent ops, and comparisons of kernels with the references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = (
    "MIXED",
    "PADDING",
    "Op",
    "Problem",
    "Row",
    "check",
    "check_chunks",
    "delta_problem",
    "run",
    "short_conv_problem",
    "state_space_problem",
    "step_tensors",
)

Op = Callable[..., Tensor]
Row = tuple[int, tuple[int, int, int, int]]  # tokens of a sequence, its row of `state_slots`

CPU = torch.device("cpu")
NUM_SLOTS = 12
# The sequences begin, continue in place, continue elsewhere and share a slot that they read. Two
# have checkpoints, one of which comes before the convolution has only new inputs. Two are absent.
MIXED: list[Row] = [
    (5, (0, 3, 0, 0)),
    (0, (0, 0, 0, 0)),
    (1, (4, 4, 0, 0)),
    (22, (2, 5, 6, 18)),
    (1, (2, 7, 0, 0)),
    (2, (2, 8, 9, 1)),
    (17, (10, 10, 0, 0)),
    (0, (1, 1, 0, 0)),
]
PADDING = 3
"""Rows after those of the sequences in a step of `check`."""


class Problem(NamedTuple):
    """The arguments of an op without those that describe the step."""

    tokens: tuple[Tensor, ...]  # one row for each token
    weights: tuple[Tensor | None, ...]
    states: tuple[Tensor, ...]  # changed by the op
    options: tuple[float, ...]

    def to(self, device: torch.device) -> Problem:
        """The same on a device."""
        return Problem(
            tuple(one.to(device) for one in self.tokens),
            tuple(None if one is None else one.to(device) for one in self.weights),
            tuple(one.to(device) for one in self.states),
            self.options,
        )


class Result(NamedTuple):
    """What an op returned and wrote."""

    out: Tensor
    states: tuple[Tensor, ...]


def step_tensors(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """`query_start_loc` [S + 1] and `state_slots` [S, 4], both int32."""
    lengths, slots = zip(*rows, strict=True)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return starts.to(torch.int32), torch.tensor(slots, dtype=torch.int32)


def run(op: Op, problem: Problem, rows: Sequence[Row], first: int = 0, padding: int = 0) -> Result:
    """One step with the rows of tokens from `first` on; the problem's states are not changed."""
    starts, slots = step_tensors(rows)
    stop = first + int(starts[-1]) + padding
    states = tuple(state.clone() for state in problem.states)
    device = states[0].device
    tokens = (tensor[first:stop] for tensor in problem.tokens)
    step = (starts.to(device), slots.to(device))
    return Result(op(*tokens, *problem.weights, *states, *step, *problem.options), states)


def _assert_within(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare tensors on any devices."""
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


def check(op: Op, reference: Op, problem: Problem, rows: Sequence[Row], tolerance: float) -> None:
    """Compare outputs and all slots with those of the reference; slot 0 has no meaning.

    The tolerance is both absolute and relative.
    """
    found = run(op, problem, rows, padding=PADDING)
    expected = run(reference, problem.to(CPU), rows, padding=PADDING)
    assert found.out.is_contiguous()
    assert (found.out[-PADDING:] == 0).all(), "rows of padding must be zero"
    _assert_within(found.out, expected.out, tolerance)
    written = {slot for length, row in rows if length for slot in (row[1], row[2])}
    for one, other, before in zip(found.states, expected.states, problem.states, strict=True):
        _assert_within(one[1:], other[1:], tolerance)
        kept = [slot for slot in range(NUM_SLOTS) if slot not in written]
        assert torch.equal(one[kept].nan_to_num(), before[kept].nan_to_num())


def check_chunks(op: Op, problem: Problem, chunks: Sequence[int]) -> None:
    """A sequence has the same bits as a whole, in chunks, and beside others."""
    total = sum(chunks)
    whole = run(op, problem, [(total, (2, 3, 4, chunks[0]))])
    states, begin, slot = problem.states, 0, 2
    for size in chunks:
        part = run(op, problem._replace(states=states), [(size, (slot, 5, 0, 0))], first=begin)
        assert torch.equal(part.out, whole.out[begin : begin + size])
        if begin == 0:
            assert all(torch.equal(one[5], other[4]) for one, other in _pairs(part, whole))
        begin, states, slot = begin + size, part.states, 5
    ends = zip(states, whole.states, strict=True)
    assert all(torch.equal(one[5], other[3]) for one, other in ends)
    beside = tuple(torch.cat((one[-7:], one[:total], one[-4:])) for one in problem.tokens)
    rows: list[Row] = [(7, (0, 6, 0, 0)), (total, (2, 3, 0, 0)), (4, (8, 8, 0, 0))]
    among = run(op, problem._replace(tokens=beside), rows)
    assert torch.equal(among.out[7 : 7 + total], whole.out)
    assert all(torch.equal(one[3], other[3]) for one, other in _pairs(among, whole))


def _pairs(one: Result, other: Result) -> list[tuple[Tensor, Tensor]]:
    return list(zip(one.states, other.states, strict=True))


def delta_problem(
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    width: int,
    dtype: torch.dtype,
    num_tokens: int = 80,
) -> Problem:
    """Arguments of `gated_delta_rule`."""
    made = _Made(dtype)
    channels, values = 2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim
    return Problem(
        (made.rows(num_tokens, channels + values), made.rows(num_tokens, 2 * v_heads)),
        (
            made(channels, width, scale=0.5),
            made(v_heads, single=True),
            made(v_heads, single=True),
            1 + made(v_dim, scale=0.1),
        ),
        (made.slots(width - 1, channels), made.slots(v_heads, k_dim, v_dim, single=True)),
        (k_heads, 1e-6),
    )


def short_conv_problem(
    channels: int, width: int, dtype: torch.dtype, *, bias: bool, num_tokens: int = 80
) -> Problem:
    """Arguments of `gated_short_conv`."""
    made = _Made(dtype)
    return Problem(
        (made.rows(num_tokens, 3 * channels),),
        (made(channels, width, scale=0.5), made(channels) if bias else None),
        (made.slots(width - 1, channels),),
        (),
    )


def state_space_problem(
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    width: int,
    dtype: torch.dtype,
    *,
    bias: bool,
    limits: tuple[float, float] = (0.0, float("inf")),
    num_tokens: int = 80,
) -> Problem:
    """Arguments of `state_space`."""
    made = _Made(dtype)
    inner = heads * head_dim
    channels = inner + 2 * groups * state_size
    return Problem(
        (made.rows(num_tokens, inner + channels + heads),),
        (
            made(channels, width, scale=0.5),
            made(channels, scale=0.3) if bias else None,
            *(made(heads, single=True) for _ in range(3)),
            1 + made(inner, scale=0.1),
        ),
        (made.slots(width - 1, channels), made.slots(heads, head_dim, state_size, single=True)),
        (groups, 1e-5, *limits),
    )


class _Made:
    """Random tensors, each with a seed of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int, scale: float = 1.0, single: bool = False) -> Tensor:
        values = torch.randn(shape, generator=self._generator) * scale
        return values if single else values.to(self._dtype)

    def rows(self, num_tokens: int, columns: int) -> Tensor:
        """[T, columns] with a row stride that is larger than the rows."""
        return self(num_tokens, columns + 8)[:, :columns]

    def slots(self, *shape: int, single: bool = False) -> Tensor:
        """States of all slots. Slot 0 is never read, so it has no numbers."""
        states = self(NUM_SLOTS, *shape, single=single)
        states[0] = torch.nan
        return states
