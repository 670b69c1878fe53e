"""Log-probabilities of sampled tokens: `logprobs`, `logprob_token_ids` and the candidates of beams.

They are computed from the model's raw logits. Those of beams are computed after the logits
processors and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ostinato.ops.sample_rows import rows_at_once
from ostinato.ops.sampling import chosen_logprobs, token_logprobs
from ostinato.runtime.scheduling.beam_search import num_candidates
from ostinato.runtime.types.outputs import TokenLogprobs
from ostinato.runtime.types.request import Request

__all__ = ("LogprobRequest", "PendingLogprobs", "start_logprobs")


class LogprobRequest:
    """Which log-probabilities a row reports.

    Attributes:
        num_top: how many of the likeliest tokens; None = the row reports nothing.
        token_ids: tokens to report instead of the likeliest; None = report the likeliest.
    """

    __slots__ = ("num_top", "on_device", "token_ids")

    def __init__(self, request: Request, device: torch.device) -> None:
        params = request.sampling
        self.num_top = num_candidates(request) if params.use_beam_search else params.logprobs
        self.token_ids = params.logprob_token_ids
        self.on_device: Tensor | None = None
        if self.token_ids is not None:
            self.num_top = 0
            self.on_device = torch.tensor(self.token_ids, dtype=torch.int64, device=device)


class PendingLogprobs(NamedTuple):
    """Log-probabilities on their way to the host."""

    columns: list[Tensor]  # the four tensors of `token_logprobs`, for the rows in `asking`
    asking: list[int]  # indices of the rows that report log-probabilities
    wanted: list[int | None]  # per row of the step, the number of likeliest tokens to report
    chosen: dict[int, Sequence[int]]  # by row, the tokens to report instead of the likeliest
    chosen_values: Tensor | None  # [C, W], log-probabilities of `chosen`, padded to W tokens

    def read(self) -> list[TokenLogprobs | None]:
        """Wait for the device; returns one entry per row, None for rows that report nothing."""
        values, ranks, ids, tops = (column.tolist() for column in self.columns)
        result: list[TokenLogprobs | None] = [None] * len(self.wanted)
        for place, index in enumerate(self.asking):
            count = self.wanted[index] or 0
            result[index] = TokenLogprobs(
                values[place], ranks[place], ids[place][:count], tops[place][:count]
            )
        if self.chosen_values is not None:
            of_rows = self.chosen_values.tolist()
            for (index, token_ids), of_row in zip(self.chosen.items(), of_rows, strict=True):
                entry = result[index]
                assert entry is not None, "a row that chooses tokens asks for log-probabilities"
                result[index] = TokenLogprobs(
                    entry.logprob, entry.rank, list(token_ids), of_row[: len(token_ids)]
                )
        return result


def start_logprobs(
    raw: Tensor, token_ids: Tensor, requests: Sequence[LogprobRequest]
) -> PendingLogprobs | None:
    """Compute the reported log-probabilities, without waiting for the device.

    Args:
        raw: [R, V] float32 logits.
        token_ids: [R] int64, the tokens that were drawn.
        requests: [R], one per row.

    Returns:
        None when no row reports anything.
    """
    wanted = [request.num_top for request in requests]
    asking = [index for index, count in enumerate(wanted) if count is not None]
    if not asking:
        return None
    top = min(max(wanted[index] or 0 for index in asking), raw.shape[-1])
    where = torch.tensor(asking, device=raw.device)
    parts = [
        token_logprobs(raw[rows], token_ids[rows], top)
        for rows in where.split(rows_at_once(raw.shape[-1]))
    ]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    chosen: dict[int, Sequence[int]] = {
        index: request.token_ids
        for index, request in enumerate(requests)
        if request.token_ids is not None
    }
    return PendingLogprobs(columns, asking, wanted, chosen, _chosen(raw, requests))


def _chosen(raw: Tensor, requests: Sequence[LogprobRequest]) -> Tensor | None:
    """[C, W] log-probabilities of chosen tokens, for the C rows that choose some."""
    asking = [(i, one.on_device) for i, one in enumerate(requests) if one.on_device is not None]
    if not asking:
        return None
    step = rows_at_once(raw.shape[-1])
    where = torch.tensor([index for index, _ in asking], device=raw.device).split(step)
    padded = pad_sequence([ids for _, ids in asking], batch_first=True).split(step)
    return torch.cat(
        [chosen_logprobs(raw[some], these) for some, these in zip(where, padded, strict=True)]
    )
