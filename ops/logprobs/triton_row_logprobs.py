"""The Triton kernel of `ostinato::row_logprobs`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ("score_rows",)

# BLOCK logits are read at once. Each lane adds up the exponentials of its own logits in order. So a
# row's bits depend on these constants and not on the other rows.
_CONSTANTS: dict[str, Any] = {"BLOCK": 4096, "BLOCK_W": 16, "num_warps": 8}


@triton.jit(
    do_not_specialize=["vocab_size", "num_tokens"],
    # The ids may be a slice of a tensor, whose address has any alignment.
    do_not_specialize_on_alignment=["token_ids"],
)
def _score_kernel(
    logits,  # [R, V] float32
    token_ids,  # [R, W] int64 contiguous
    logprobs,  # [R, W] float32 contiguous
    ranks,  # [R] int64
    totals,  # [R] float32, log of the sum of exponentials
    row_stride,
    vocab_size,
    num_tokens,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    never = float("-inf")
    begin = logits + row * row_stride
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], never, tl.float32)
    for first in range(0, vocab_size, BLOCK):
        values = tl.load(begin + first + lane, mask=first + lane < vocab_size, other=never)
        highest = tl.maximum(highest, tl.where(values == values, values, never))
    most = tl.max(highest)
    chosen = tl.load(begin + tl.load(token_ids + row * num_tokens))
    chosen = tl.where(chosen == chosen, chosen, never)
    sums = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        values = tl.load(begin + first + lane, mask=first + lane < vocab_size, other=never)
        sums += tl.where(values > never, tl.exp(values - most), 0.0)
        above += (values > chosen).to(tl.int32)
    total = most + tl.log(tl.sum(sums))
    tl.store(totals + row, total)
    tl.store(ranks + row, 1 + tl.sum(above).to(tl.int64))
    for first in range(0, num_tokens, BLOCK_W):
        place = first + tl.arange(0, BLOCK_W)
        ids = tl.load(token_ids + row * num_tokens + place, mask=place < num_tokens, other=0)
        values = tl.load(begin + ids)
        result = tl.where(values > never, values - total, never)
        tl.store(logprobs + row * num_tokens + place, result, mask=place < num_tokens)


def score_rows(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens, the rank of each row's first token, and the row's normaliser.

    Args:
        logits: [R, V] float32, rows contiguous.
        token_ids: [R, W] int64 in [0, V).

    Returns:
        (logprobs [R, W] float32, ranks [R] int64, totals [R] float32).

    Raises:
        ValueError: the logits are not float32, or their rows are not contiguous.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(
            f"row_logprobs: logits must be float32 with contiguous rows, got {logits.dtype} with "
            f"strides {logits.stride()}"
        )
    num_rows, num_tokens = token_ids.shape
    logprobs = logits.new_empty(num_rows, num_tokens)
    ranks = token_ids.new_empty(num_rows)
    totals = logits.new_empty(num_rows)
    if num_rows:
        _score_kernel[(num_rows,)](
            logits,
            token_ids.contiguous(),
            logprobs,
            ranks,
            totals,
            logits.stride(0),
            logits.shape[1],
            num_tokens,
            **_CONSTANTS,
        )
    return logprobs, ranks, totals
