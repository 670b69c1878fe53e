"""Made-up rows of logits, and a check of their log-probabilities in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ostinato.ops.logprobs.row_logprobs import RowLogprobs

__all__ = ("check", "make_rows")


def make_rows(seed: int, num_rows: int, vocabulary: int, form: str) -> Tensor:
    """[R, V], a view of longer rows.

    `form` is normal, ties, masked (some logits are -inf) or none (the first row is -inf).
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, vocabulary + 3, generator=generator)[:, :vocabulary] * 3.0
    if form == "ties":
        rows = rows.round()
    elif form == "masked":
        rows[torch.rand(rows.shape, generator=generator) < 0.4] = -math.inf
    elif form == "none":
        rows[0] = -math.inf
    return rows


def check(
    score: Callable[[Tensor, Tensor, int], RowLogprobs],
    seed: int,
    vocabulary: int,
    form: str,
    num_tokens: int,
    top: int,
) -> None:
    """Compare `score` of a few rows with the definitions in float64."""
    logits = make_rows(seed, 3, vocabulary, form)
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(vocabulary, (3, num_tokens), generator=generator)
    exact = logits.double().log_softmax(-1).nan_to_num(-math.inf, neginf=-math.inf)
    found = score(logits, ids, top)
    close = {"atol": 2e-6, "rtol": 2e-6, "check_dtype": False}
    torch.testing.assert_close(found.logprobs, exact.gather(-1, ids), **close)
    assert torch.equal(found.ranks, 1 + (logits > logits.gather(-1, ids[:, :1])).sum(-1))
    torch.testing.assert_close(found.top_logprobs, exact.topk(top).values, **close)
    assert torch.equal(logits.gather(-1, found.top_ids), logits.topk(top).values)
    for row in found.top_ids.tolist():
        assert len(set(row)) == top
