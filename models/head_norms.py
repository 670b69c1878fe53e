"""RMS norms of queries and of keys over all heads of a token, which are divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.models.linear_layers import LinearBase
from ostinato.ops.norm import rms_norm, scale_by_squares, square_sums
from ostinato.ops.parallel.collectives import all_reduce

__all__ = ("norm_all_heads",)


def norm_all_heads(
    q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], eps: float, out: LinearBase
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of q and of k, whose mean squares are those of the rows of all ranks.

    The ranks exchange two numbers for each token, both at once. If several ranks have the same
    heads of keys, each of these heads counts equally often, so the mean is the same.

    Args:
        q: [T, Dq], last dimension contiguous: the queries of this rank.
        k: [T, Dk] in q's dtype, last dimension contiguous: the keys of this rank.
        weights: [Dq] and [Dk], this rank's part of the weights of the two norms.
        eps: added to the mean squares.
        out: the projection after the attention, which has the group of ranks.

    Returns:
        [T, Dq] and [T, Dk] in q's dtype.
    """
    q_weight, k_weight = weights
    if out.group is None:
        return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    ranks = out.inputs.total // out.inputs.size
    squares = all_reduce(square_sums(q, k), None, out.group, torch.float32, out.exchange)
    return (
        scale_by_squares(q, q_weight, squares, 0, ranks * q.shape[1], eps),
        scale_by_squares(k, k_weight, squares, 1, ranks * k.shape[1], eps),
    )
