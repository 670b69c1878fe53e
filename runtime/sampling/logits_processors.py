"""Logits processors: bias, penalties, minimum length, token limits and rules of transcripts.

A processor keeps its own state for each row. The sampler uses the protocol only. So it stays as it
is when a new parameter changes logits: the parameter gets a class here and an entry in
`make_processors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ostinato.ops.sampling.plain_sampling import apply_penalties
from ostinato.runtime.sampling.row_state import RowState
from ostinato.runtime.sampling.to_device import to_device
from ostinato.runtime.sampling.token_limits import TokenLimits
from ostinato.runtime.sampling.transcript_processor import TranscriptProcessor
from ostinato.runtime.types.request import Request

__all__ = ("LogitBias", "LogitsProcessor", "MinTokens", "Penalties", "make_processors")


class LogitsProcessor(RowState, Protocol):
    """Changes the logits of the rows whose requests ask for it."""

    def changes(self, row: int) -> bool:
        """Whether the processor can change the row's logits."""
        ...

    def depends_on_output(self, row: int) -> bool:
        """Whether its effect on the row depends on the tokens that the row drew before."""
        ...

    def apply(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Change logits in place, without waiting for the device.

        Args:
            logits: [R, V] float32.
            rows: [R], for each row of logits the row of its sequence. With drafts, a sequence's row
                occurs several times, with rising positions.
            positions: [R], the position of each new token in its sequence.
        """
        ...

    def advance(self, rows: Sequence[int], token_ids: Tensor) -> None:
        """Note the tokens that were drawn: [R] int64, on the device."""
        ...


class _Bias(NamedTuple):
    token_ids: Tensor  # [B] int64
    values: Tensor  # [B] float32


class LogitBias:
    """`logit_bias`: adds a number to the logits of some tokens."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, _Bias] = {}

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        self._rows.pop(row, None)
        bias = request.sampling.logit_bias
        if bias:
            self._rows[row] = _Bias(
                to_device(list(bias), self._device),
                to_device(list(bias.values()), self._device, torch.float32),
            )

    def changes(self, row: int) -> bool:
        return row in self._rows

    def depends_on_output(self, row: int) -> bool:
        return False

    def apply(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> None:
        if not self._rows:
            return
        for index, row in enumerate(rows):
            bias = self._rows.get(row)
            if bias is not None:
                logits[index][bias.token_ids] += bias.values

    def advance(self, rows: Sequence[int], token_ids: Tensor) -> None:
        pass


class _Counts(NamedTuple):
    counts: Tensor  # [V] int32, of output tokens
    in_prompt: Tensor  # [V] bool
    repetition: float
    presence: float
    frequency: float


class Penalties:
    """`repetition_penalty`, `presence_penalty` and `frequency_penalty`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, _Counts] = {}

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        self._rows.pop(row, None)
        params = request.sampling
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties == (1.0, 0.0, 0.0):
            return
        output = to_device(output_token_ids, self._device)
        counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        in_prompt[to_device(request.prompt_token_ids, self._device)] = True
        self._rows[row] = _Counts(counts, in_prompt, *penalties)

    def changes(self, row: int) -> bool:
        return row in self._rows

    def depends_on_output(self, row: int) -> bool:
        return row in self._rows

    def apply(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> None:
        if not self._rows:
            return
        for index, row in enumerate(rows):
            state = self._rows.get(row)
            if state is not None:
                apply_penalties(
                    logits[index],
                    state.counts,
                    state.in_prompt,
                    repetition=state.repetition,
                    presence=state.presence,
                    frequency=state.frequency,
                )

    def advance(self, rows: Sequence[int], token_ids: Tensor) -> None:
        if not self._rows:
            return
        for index, row in enumerate(rows):
            state = self._rows.get(row)
            if state is not None:
                # A slice, because indexing by one element would wait for the device.
                state.counts[token_ids[index : index + 1]] += 1


class _Early(NamedTuple):
    min_length: int  # tokens, prompt included
    stop_ids: Tensor  # int64


class MinTokens:
    """`min_tokens`: no end-of-sequence or stop token before this number of output tokens.

    For a row with a grammar `GrammarMasks` does this, because a grammar can require a stop token.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, _Early] = {}

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        self._rows.pop(row, None)
        params = request.sampling
        if params.min_tokens and not request.grammar:
            ids = () if params.ignore_eos else request.eos_token_ids
            self._rows[row] = _Early(
                len(request.prompt_token_ids) + params.min_tokens,
                to_device([*ids, *params.stop_token_ids], self._device),
            )

    def changes(self, row: int) -> bool:
        return row in self._rows

    def depends_on_output(self, row: int) -> bool:
        return False

    def apply(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> None:
        if not self._rows:
            return
        for index, row in enumerate(rows):
            state = self._rows.get(row)
            if state is not None and positions[index] < state.min_length:
                logits[index][state.stop_ids] = float("-inf")

    def advance(self, rows: Sequence[int], token_ids: Tensor) -> None:
        pass


def make_processors(
    *, max_num_seqs: int, vocab_size: int, device: torch.device
) -> list[LogitsProcessor]:
    """All processors, in the order in which they change logits."""
    return [
        LogitBias(device),
        Penalties(vocab_size, device),
        MinTokens(device),
        TokenLimits(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device),
        TranscriptProcessor(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device),
    ]
