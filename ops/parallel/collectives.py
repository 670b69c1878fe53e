"""The collectives of tensor parallelism: `ostinato::all_reduce` and `ostinato::gather_vocab`.

A rank is a process that holds a part of the weights (models/sharding.py). To combine the parts of a
result, all ranks of the group call one of these ops, with values of equal shapes.

The group is an argument of the ops: [1] int64 on the CPU, the handle of a `ParallelGroup`
(group.py) or of a `DistributedGroup` (distributed_group.py). So one compiled program serves every
rank. There are ops for shared memory and other ops for torch.distributed, so a compiled program
works with one kind of group.

In shared memory the parts are added in the order of the ranks' numbers, whatever the timing and the
size. So the bits of a token depend neither on other tokens nor on which rank was first, and they
are equal on all ranks. These kernels are ops/native/collectives/collectives.cpp, and run on CPUs
only.

NCCL and gloo choose the order of a sum by themselves.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ostinato.ops.parallel.distributed_group import group_at
from ostinato.ops.parallel.exchange import Exchange
from ostinato.ops.register import register_op

__all__ = ("all_reduce", "gather_vocab")


def all_reduce(
    partial: Tensor,
    residual: Tensor | None,
    group: Tensor,
    dtype: torch.dtype,
    exchange: Exchange = Exchange.shared_memory,
) -> Tensor:
    """The sum of `partial` of all ranks and of `residual`, rounded to `dtype`.

    Shared memory adds in float32 and rounds once. Other exchanges round each sum of two ranks to
    the dtype of `partial`.

    Args:
        partial: [T, D] contiguous, float32 or of `dtype`: this rank's part of the sum.
        residual: [T, D] contiguous, of `dtype`, equal on all ranks, added once; None = nothing.
        group: [1] int64 on the CPU, the handle of a group.
        dtype: float32, bfloat16 or float16.
        exchange: that of the group.

    Returns:
        [T, D] contiguous, of `dtype`; the same bits on all ranks.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or no group was joined.
        RuntimeError: the group in shared memory was ended, or a rank did not come in time.
        GroupEndedError: the `DistributedGroup` was ended, or one of its ranks has ended.
    """
    op = _distributed_sum if exchange.is_distributed else _all_reduce
    return op(partial, residual, group, str(dtype).removeprefix("torch."))


def gather_vocab(
    part: Tensor, group: Tensor, world: int, exchange: Exchange = Exchange.shared_memory
) -> Tensor:
    """The logits of all ranks side by side, in the order of the ranks.

    Args:
        part: [R, V / world] float32, contiguous: this rank's columns.
        group: [1] int64 on the CPU, the handle of a group.
        world: ranks of the group.
        exchange: that of the group.

    Returns:
        [R, V] float32, contiguous, on every rank.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or no group was joined.
        RuntimeError: the group in shared memory was ended, or a rank did not come in time.
        GroupEndedError: the `DistributedGroup` was ended, or one of its ranks has ended.
    """
    op = _distributed_gather if exchange.is_distributed else _gather_vocab
    return op(part, group, world)


def _no_kernel(device: torch.device) -> NoReturn:
    raise ValueError(
        f"shared memory carries values between CPUs, and a rank computes on {device}; its group "
        "must be a DistributedGroup"
    )


def _sum_distributed(partial: Tensor, residual: Tensor | None, group: Tensor, dtype: str) -> Tensor:
    return group_at(group).all_reduce(partial, residual, getattr(torch, dtype))


def _gather_distributed(part: Tensor, group: Tensor, world: int) -> Tensor:
    joined = group_at(group)
    if world != joined.world:
        raise ValueError(f"world is {world}, and the group has {joined.world} ranks")
    return joined.gather(part)


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
_distributed_sum = register_op(
    "distributed_sum", {"CompositeExplicitAutograd": _sum_distributed}, fake=_reduce_fake
)
_distributed_gather = register_op(
    "distributed_gather", {"CompositeExplicitAutograd": _gather_distributed}, fake=_gather_fake
)
