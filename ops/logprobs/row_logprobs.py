"""The op `ostinato::row_logprobs`: natural-log probabilities of tokens, row by row.

Its kernels (C++ on a CPU, Triton on CUDA) compute the same bits for a row alone and in a batch,
with any number of threads. `torch.logsumexp` does not, because it divides long rows among threads
if there are few rows.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.register import register_op

__all__ = ("RowLogprobs", "row_logprobs")

_NEVER = float("-inf")


class RowLogprobs(NamedTuple):
    """The results of `row_logprobs`."""

    logprobs: Tensor  # [R, W] float32, of the tokens that were asked for
    ranks: Tensor  # [R] int64, rank of the first of these tokens; 1 = the likeliest
    top_ids: Tensor  # [R, top] int64, the likeliest tokens in order
    top_logprobs: Tensor  # [R, top] float32


def row_logprobs(logits: Tensor, token_ids: Tensor, top: int) -> RowLogprobs:
    """Log-probabilities of given tokens and of the likeliest ones.

    A token whose logit is -inf or NaN has the log-probability -inf.

    Args:
        logits: [R, V] float32, rows contiguous.
        token_ids: [R, W] int64 in [0, V), W at least 1.
        top: how many of the likeliest tokens, at most V; 0 = none.
    """
    return RowLogprobs(*_op(logits, token_ids, top))


def _plain(logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op in plain torch. Tests compare the kernels with it."""
    logits = logits.masked_fill(logits.isnan(), _NEVER)
    chosen = logits.gather(-1, token_ids)
    total = logits.logsumexp(-1, keepdim=True)
    ranks = (logits > chosen[:, :1]).sum(-1) + 1
    values, ids = logits.topk(top, sorted=True)
    return _normalised(chosen, total), ranks, ids, _normalised(values, total)


def _on_cuda(logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernel = import_module("ostinato.ops.logprobs.triton_row_logprobs")
    logprobs, ranks, total = kernel.score_rows(logits, token_ids)
    values, ids = logits.masked_fill(logits.isnan(), _NEVER).topk(top, sorted=True)
    return logprobs, ranks, ids, _normalised(values, total[:, None])


def _normalised(values: Tensor, total: Tensor) -> Tensor:
    """`values` minus `total`; -inf stays -inf, also in a row in which all logits are -inf."""
    return torch.where(values == _NEVER, values, values - total)


def _fake(logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = logits.shape[0]
    return (
        logits.new_empty(token_ids.shape),
        token_ids.new_empty(num_rows),
        token_ids.new_empty(num_rows, top),
        logits.new_empty(num_rows, top),
    )


_op = register_op(
    "row_logprobs", {"CompositeExplicitAutograd": _plain, "CUDA": _on_cuda}, fake=_fake
)
