"""Computes the log-probabilities of prompt tokens (`prompt_logprobs`) from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.logprobs.row_logprobs import row_logprobs
from ostinato.runtime.types.outputs import TokenLogprobs
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence

__all__ = ("PromptScorer",)


class _Row(NamedTuple):
    prompt_token_ids: list[int]
    num_top: int


class PromptScorer:
    """Scores prompt tokens chunk by chunk.

    Args:
        compute_logits: [R, D] hidden states -> [R, V] float32 logits.
        max_rows: largest number of rows of logits that are computed at once.
        hold_threads: called with the number of logits. Returns a context, which is open while they
            are processed.
    """

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Tensor],
        *,
        max_rows: int,
        hold_threads: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self._compute_logits = compute_logits
        self._max_rows = max_rows
        self._hold_threads = hold_threads
        self._rows: dict[int, _Row] = {}

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Note which prompt tokens of the sequence in this row are to be scored."""
        self._rows.pop(row, None)
        if request.sampling.prompt_logprobs is not None:
            self._rows[row] = _Row(request.prompt_token_ids, request.sampling.prompt_logprobs)

    def score(
        self, hidden: Tensor, scheduled: list[ScheduledSequence]
    ) -> list[list[TokenLogprobs]]:
        """Score the step's prompt tokens; returns one list for each entry that has any.

        Args:
            hidden: [T, D], the final hidden states of the step.
            scheduled: the step's entries, in the order of their tokens.
        """
        result = []
        begin = 0
        for entry in scheduled:
            if entry.num_prompt_logits:
                row = self._rows[entry.row]
                end = begin + entry.num_prompt_logits
                first = entry.start + 1
                targets = row.prompt_token_ids[first : first + entry.num_prompt_logits]
                result.append(self._score(hidden[begin:end], targets, row.num_top))
            begin += entry.num_new_tokens
        return result

    def _score(self, hidden: Tensor, targets: list[int], num_top: int) -> list[TokenLogprobs]:
        scores: list[TokenLogprobs] = []
        for begin in range(0, len(targets), self._max_rows):
            part = targets[begin : begin + self._max_rows]
            logits = self._compute_logits(hidden[begin : begin + self._max_rows])
            token_ids = torch.tensor(part, device=logits.device)[:, None]
            with self._hold_threads(logits.numel()):
                values, *found = row_logprobs(logits, token_ids, min(num_top, logits.shape[-1]))
            columns = (values.squeeze(-1), *found)
            scores += map(TokenLogprobs, *(column.tolist() for column in columns))
        return scores
