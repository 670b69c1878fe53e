"""The tokens of a launched step: drawn, or drawn and compared with drafts."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.runtime.sampling.grammar_rows import GrammarRow, forced_tokens
from ostinato.runtime.sampling.to_device import to_device
from ostinato.runtime.sampling.token_logprobs import PendingLogprobs
from ostinato.runtime.types.step import StepResult

__all__ = ("PendingTokens", "PendingVerification", "VerifiedTokens")


class _HostCopy:
    """A copy of integers to the host, which starts at once.

    Args:
        values: [N] int64. The next step may overwrite it.
    """

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cpu":
            self._host = values.clone()
        else:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[int]:
        """Wait for the copy; returns the integers."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


class PendingTokens:
    """A step's tokens, which the device can still be computing.

    `last_tokens` [R] int64 lies on the device. The next launch overwrites it. The copy to the host
    starts at once.
    """

    def __init__(
        self,
        token_ids: Tensor,
        logprobs: PendingLogprobs | None,
        grammars: Sequence[GrammarRow | None] = (),
        held: Set[int] = frozenset(),
        *,
        reports_forced: bool = False,
    ) -> None:
        self.last_tokens = token_ids
        self._held = held  # rows whose tokens are void
        self._reports_forced = reports_forced
        self._logprobs = logprobs
        self._grammars = grammars  # mask state of each row of the step; empty = no masks
        self._copy = _HostCopy(token_ids)

    def read(self) -> StepResult:
        """Wait for the device, pass the tokens to the rows' grammars, and return the tokens."""
        token_ids = self._copy.read()
        logprobs = None if self._logprobs is None else self._logprobs.read()
        counts = None
        if self._held:
            counts = [int(index not in self._held) for index in range(len(token_ids))]
            token_ids = list(compress(token_ids, counts))
            logprobs = None if logprobs is None else list(compress(logprobs, counts))
        result = StepResult(token_ids, logprobs, counts=counts)
        place = 0  # index of the row's token in the result
        for index, grammar in enumerate(self._grammars):
            if index in self._held:
                continue
            ending = None if grammar is None else grammar.take(token_ids[place])
            if ending is not None:
                result.endings[place] = ending
            place += 1
        if self._reports_forced:
            result.forced_token_ids = forced_tokens(self._grammars)
        return result


class VerifiedTokens(NamedTuple):
    """The tokens of a step whose drafts the host has verified. The host has the tokens already.

    Attributes:
        last_tokens: [N], the last token of each sequence that samples: int64 on the device of a
            GPU, a list on a CPU, because torch takes 10 microseconds or more to make a tensor.
        token_ids: the tokens of all sequences, flat.
        counts: the number of tokens of each sequence.
        endings: see `StepResult`.
        logprobs: log-probabilities of the tokens; None = no row reports any.
        forced_token_ids: see `StepResult`.
    """

    last_tokens: Tensor | list[int]
    token_ids: list[int]
    counts: list[int]
    endings: dict[int, str]
    logprobs: PendingLogprobs | None
    forced_token_ids: dict[int, list[int]]

    def read(self) -> StepResult:
        """Wait for the log-probabilities; returns the step's result."""
        logprobs = None if self.logprobs is None else self.logprobs.read()
        return StepResult(
            self.token_ids,
            logprobs,
            endings=self.endings,
            counts=self.counts,
            forced_token_ids=self.forced_token_ids,
        )


class PendingVerification:
    """The tokens of a step that verifies drafts, which the device can still be computing.

    A token was drawn for every row of logits. The tokens of a sequence are valid up to and
    including the first one that differs from its draft. The step is launched without waiting, and
    the host gets tokens and drafts in one copy.

    Args:
        token_ids: [R] int64, the token drawn from each row. The next launch overwrites it.
        following: [R] int64, the draft of each row's token. In the row after a sequence's last
            draft it is any token.
        num_drafts: for each of the N sequences that sample, its number of drafts k. The sequence
            has 1 + k rows.
        logprobs: log-probabilities of the rows' tokens; None = no row reports any.

    Attributes:
        last_tokens: [N] int64 on the device, the last valid token of each sequence.
    """

    def __init__(
        self,
        token_ids: Tensor,
        following: Tensor,
        num_drafts: Sequence[int],
        logprobs: PendingLogprobs | None,
    ) -> None:
        self._num_drafts = num_drafts
        self._logprobs = logprobs
        self._copy = _HostCopy(torch.cat((token_ids, following)))
        begins = [0]
        for count in num_drafts:
            begins.append(begins[-1] + 1 + count)
        device, most = token_ids.device, max(num_drafts)
        begin, counts = to_device([*begins[:-1], *num_drafts], device).view(2, -1)
        places = torch.arange(most, device=device)
        rows = (begin[:, None] + places).clamp_max_(len(token_ids) - 1)
        is_right = (token_ids[rows] == following[rows]) & (places < counts[:, None])
        num_right = is_right.to(torch.int64).cumprod(1).sum(1)
        self.last_tokens = token_ids[begin + num_right]

    def read(self) -> StepResult:
        """Wait for the device, and return the valid tokens."""
        values = self._copy.read()
        num_rows = len(values) // 2
        drawn, drafts = values[:num_rows], values[num_rows:]
        counts: list[int] = []
        is_valid: list[bool] = []
        begin = 0
        for num_drafts in self._num_drafts:
            end = begin + num_drafts
            row = begin
            while row < end and drawn[row] == drafts[row]:
                row += 1
            counts.append(row - begin + 1)
            is_valid += [True] * counts[-1] + [False] * (end - row)
            begin = end + 1
        logprobs = None if self._logprobs is None else self._logprobs.read()
        return StepResult(
            list(compress(drawn, is_valid)),
            None if logprobs is None else list(compress(logprobs, is_valid)),
            counts=counts,
        )
