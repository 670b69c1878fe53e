"""The collectives of tensor parallelism: `ostinato::all_reduce` and `ostinato::gather_vocab`.

A rank is a process that holds a part of the weights (models/sharding.py). To combine the parts of a
result, all ranks of the group call one of these ops, with values of equal shapes.

The group is an argument of the ops: [1] int64 on the CPU, the handle of a `ParallelGroup`
(group.py). So one compiled program serves every rank.

The parts are added in the order of the ranks' numbers, whatever the timing and the size. So the
bits of a token depend neither on other tokens nor on which rank came first, and they are equal on
all ranks.

The kernels are ops/native/collectives/collectives.cpp. They run on CPUs only.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ostinato.ops.register import register_op

__all__ = ("all_reduce", "gather_vocab")


def all_reduce(
    partial: Tensor, residual: Tensor | None, group: Tensor, dtype: torch.dtype
) -> Tensor:
    """partial of rank 0 + partial of rank 1 + ... + residual, in float32, then rounded to `dtype`.

    Args:
        partial: [T, D] contiguous, float32 or of `dtype`: this rank's part of the sum.
        residual: [T, D] contiguous, of `dtype`, equal on all ranks, added once; None = nothing.
        group: [1] int64, the handle of a `ParallelGroup`.
        dtype: float32, bfloat16 or float16.

    Returns:
        [T, D] contiguous, of `dtype`; the same bits on all ranks.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or no group was joined.
        RuntimeError: the group was ended, or a rank did not come in time.
    """
    return _all_reduce(partial, residual, group, str(dtype).removeprefix("torch."))


def gather_vocab(part: Tensor, group: Tensor, world: int) -> Tensor:
    """The logits of all ranks side by side, in the order of the ranks.

    Args:
        part: [R, V / world] float32, contiguous: this rank's columns.
        group: [1] int64, the handle of a `ParallelGroup`.
        world: ranks of the group.

    Returns:
        [R, V] float32, contiguous, on every rank.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or no group was joined.
        RuntimeError: the group was ended, or a rank did not come in time.
    """
    return _gather_vocab(part, group, world)


def _no_kernel(device: torch.device) -> NoReturn:
    raise ValueError(
        f"ranks exchange values through kernels of the CPU, and there are none for {device}; set "
        "parallel.tensor=1"
    )


def _reduce_elsewhere(
    partial: Tensor, residual: Tensor | None, group: Tensor, dtype: str
) -> Tensor:
    _no_kernel(partial.device)


def _gather_elsewhere(part: Tensor, group: Tensor, world: int) -> Tensor:
    _no_kernel(part.device)


def _reduce_fake(partial: Tensor, residual: Tensor | None, group: Tensor, dtype: str) -> Tensor:
    return partial.new_empty(partial.shape, dtype=getattr(torch, dtype))


def _gather_fake(part: Tensor, group: Tensor, world: int) -> Tensor:
    return part.new_empty((part.shape[0], part.shape[1] * world))


_all_reduce = register_op(
    "all_reduce", {"CompositeExplicitAutograd": _reduce_elsewhere}, fake=_reduce_fake
)
_gather_vocab = register_op(
    "gather_vocab", {"CompositeExplicitAutograd": _gather_elsewhere}, fake=_gather_fake
)
