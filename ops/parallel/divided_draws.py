"""Draws of tokens from logits whose columns are divided among ranks, in shared memory.

Rank 0 has the parameters of the draws, so it alone decides what happens with the logits of a step.
It calls `draw_divided` or `collect_logits`. Meanwhile each other rank calls `answer_rank_0`, which
does what rank 0 needs:

- If all draws are greedy, each rank finds the likeliest of its own tokens. No logits are exchanged.
- Other draws: each rank gets the logits of some rows, and draws their tokens. A token depends only
  on its row, so these are the tokens that one process would draw.
- If logits are to be changed or reported before the draw, rank 0 gets all of them.

The kernels are ops/native/collectives/draws.cpp.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ostinato.ops.register import register_op

__all__ = ("answer_rank_0", "collect_logits", "draw_divided")


def draw_divided(part: Tensor, inputs: Tensor, group: Tensor) -> Tensor:
    """Draw one token for each row, on rank 0 with the help of the other ranks.

    Args:
        part: [R, V / ranks] float32 contiguous, the columns of rank 0.
        inputs: the parameters and random numbers of the R rows, from `sampling_inputs`.
        group: [1] int64, the handle of a `ParallelGroup`.

    Returns:
        [R] int64 token ids: those of `sample_each` with the logits of all ranks.

    Raises:
        ValueError: a shape, dtype or stride is not as above, no group was joined, or this is not
            rank 0.
        RuntimeError: the group was ended, or a rank did not come in time.
    """
    return _draw_divided(part, inputs, group)


def collect_logits(part: Tensor, group: Tensor, world: int) -> Tensor:
    """The logits of all ranks side by side, on rank 0. The other ranks give theirs and go on.

    Args:
        part: [R, V / world] float32 contiguous, the columns of rank 0.
        group: [1] int64, the handle of a `ParallelGroup`.
        world: ranks of the group.

    Returns:
        [R, V] float32 contiguous.

    Raises:
        ValueError, RuntimeError: as `draw_divided`.
    """
    return _collect_logits(part, group, world)


def answer_rank_0(part: Tensor, group: Tensor) -> None:
    """On another rank: wait for the `draw_divided` or `collect_logits` of rank 0, and do its part.

    Args:
        part: [R, V / ranks] float32 contiguous, the columns of this rank.
        group: [1] int64, the handle of a `ParallelGroup`.

    Raises:
        ValueError: as `draw_divided`, or this is rank 0, or rank 0 has other rows.
        RuntimeError: as `draw_divided`.
    """
    _answer_rank_0(part, group)


def _no_kernel(device: torch.device) -> NoReturn:
    raise ValueError(
        f"logits are divided among ranks on CPUs only, and a rank computes on {device}"
    )


def _draw_elsewhere(part: Tensor, inputs: Tensor, group: Tensor) -> Tensor:
    _no_kernel(part.device)


def _collect_elsewhere(part: Tensor, group: Tensor, world: int) -> Tensor:
    _no_kernel(part.device)


def _answer_elsewhere(part: Tensor, group: Tensor) -> Tensor:
    _no_kernel(part.device)


def _draw_fake(part: Tensor, inputs: Tensor, group: Tensor) -> Tensor:
    return part.new_empty(part.shape[:1], dtype=torch.int64)


def _collect_fake(part: Tensor, group: Tensor, world: int) -> Tensor:
    return part.new_empty((part.shape[0], part.shape[1] * world))


def _answer_fake(part: Tensor, group: Tensor) -> Tensor:
    return part.new_empty((0,), dtype=torch.int64)


_draw_divided = register_op(
    "draw_divided", {"CompositeExplicitAutograd": _draw_elsewhere}, fake=_draw_fake
)
_collect_logits = register_op(
    "collect_logits", {"CompositeExplicitAutograd": _collect_elsewhere}, fake=_collect_fake
)
_answer_rank_0 = register_op(
    "answer_rank_0", {"CompositeExplicitAutograd": _answer_elsewhere}, fake=_answer_fake
)
