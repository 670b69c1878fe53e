"""Log-probabilities of sampled tokens: `logprobs`, `logprob_token_ids` and the candidates of beams.

The log-probabilities of beams are computed from the logits after the logits processors and masks,
all others from the model's raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.logprobs.row_logprobs import RowLogprobs, row_logprobs
from ostinato.ops.sampling.sample_rows import rows_at_once
from ostinato.runtime.sampling.to_device import to_device
from ostinato.runtime.scheduling.sequences.beam_search import num_candidates
from ostinato.runtime.types.outputs import TokenLogprobs
from ostinato.runtime.types.request import Request

__all__ = ("LogprobRequest", "PendingLogprobs", "start_logprobs")


class LogprobRequest:
    """Which log-probabilities a row reports.

    Attributes:
        num_top: number of likeliest tokens to report; None = the row reports nothing.
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
            self.on_device = to_device(self.token_ids, device)


class PendingLogprobs(NamedTuple):
    """Log-probabilities that the device can still be computing."""

    # one entry per row in `asking`; `logprobs[:, 0]` and `ranks` are of the drawn tokens
    columns: RowLogprobs
    asking: list[int]  # indices of the rows that report log-probabilities
    requests: Sequence[LogprobRequest]  # one per row of the step

    def read(self) -> list[TokenLogprobs | None]:
        """Wait for the device; returns one entry per row, None for rows that report nothing."""
        result: list[TokenLogprobs | None] = [None] * len(self.requests)
        columns = (column.tolist() for column in self.columns)
        for index, values, rank, ids, tops in zip(self.asking, *columns, strict=True):
            request = self.requests[index]
            count = request.num_top or 0
            if request.token_ids is not None:
                chosen = list(request.token_ids)
                result[index] = TokenLogprobs(values[0], rank, chosen, values[1 : 1 + len(chosen)])
            else:
                result[index] = TokenLogprobs(values[0], rank, ids[:count], tops[:count])
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
    asking = [index for index, one in enumerate(requests) if one.num_top is not None]
    if not asking:
        return None
    top = min(max(requests[index].num_top or 0 for index in asking), raw.shape[-1])
    chosen = [requests[index].on_device for index in asking]
    width = max(0 if ids is None else len(ids) for ids in chosen)
    where = to_device(asking, raw.device)
    wanted = token_ids[where, None].repeat(1, 1 + width)
    for place, ids in enumerate(chosen):
        if ids is not None:
            wanted[place, 1 : 1 + len(ids)] = ids
    step = rows_at_once(raw.shape[-1])
    parts = [
        row_logprobs(raw[rows], ids, top)
        for rows, ids in zip(where.split(step), wanted.split(step), strict=True)
    ]
    columns = RowLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))
    return PendingLogprobs(columns, asking, requests)
