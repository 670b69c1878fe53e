"""From logits to tokens, for the rows of a step: the per-row sampling state and the order of
operations.

Order: log-probabilities from the raw logits; logit bias; penalties; minimum length; allowed tokens
    and bad words; grammar; temperature; top-k, top-p, min-p; one draw keyed by (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ostinato.graphs.draw import Drawer, RowDrawer
from ostinato.ops.draw import DrawPath, RowDraw, draw_bytes, draw_path, rows_at_once
from ostinato.ops.sampling import (
    apply_penalties,
    chosen_logprobs,
    token_logprobs,
    uniform_number,
)
from ostinato.runtime.execution.grammar_masks import GrammarMasks, GrammarRow, MatcherSource
from ostinato.runtime.execution.token_limits import TokenLimits, limits_tokens
from ostinato.runtime.scheduling.beam_search import num_candidates
from ostinato.runtime.types.outputs import TokenLogprobs
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult

__all__ = ("PendingTokens", "Sampler", "sampling_bytes")


class _Row:
    """A running sequence's sampling state."""

    __slots__ = (
        "bias",
        "chosen_ids",
        "counts",
        "edits",
        "grammar",
        "in_prompt",
        "is_beam",
        "is_limited",
        "min_length",
        "num_reported",
        "params",
        "path",
        "seed",
        "stop_ids",
        "top_k",
    )

    def __init__(
        self, request: Request, output_token_ids: list[int], vocab_size: int, device: torch.device
    ) -> None:
        params = request.sampling
        self.params = params
        self.seed = params.seed or 0
        # 0 means that top-k is off; the draws want it as a number of tokens.
        self.top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        self.path = draw_path(
            temperature=params.temperature,
            top_k=self.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            vocab_size=vocab_size,
        )
        self.min_length = len(request.prompt_token_ids) + params.min_tokens
        stop_ids = () if params.ignore_eos else request.eos_token_ids
        self.stop_ids = (
            torch.tensor([*stop_ids, *params.stop_token_ids], dtype=torch.int64, device=device)
            if params.min_tokens
            else None
        )
        self.bias = (
            (
                torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device),
                torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device),
            )
            if params.logit_bias
            else None
        )
        self.counts: Tensor | None = None
        self.in_prompt: Tensor | None = None
        if _has_penalties(params):
            self.counts = torch.bincount(
                torch.tensor(output_token_ids, dtype=torch.int64), minlength=vocab_size
            ).to(device, torch.int32)
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.in_prompt[torch.tensor(request.prompt_token_ids, device=device)] = True
        self.is_beam = params.use_beam_search
        # How many of the likeliest tokens are reported; None = no log-probabilities.
        self.num_reported = num_candidates(request) if self.is_beam else params.logprobs
        self.chosen_ids: Tensor | None = None  # reported instead of the likeliest
        if params.logprob_token_ids is not None:
            self.num_reported = 0
            self.chosen_ids = torch.tensor(
                params.logprob_token_ids, dtype=torch.int64, device=device
            )
        self.is_limited = limits_tokens(request)
        self.grammar: GrammarRow | None = None
        self.edits = (
            bool(params.logit_bias)
            or params.min_tokens > 0
            or self.counts is not None
            or self.is_limited
            or bool(request.grammar)
            or params.thinking is not None
        )

    def draw(self, position: int) -> RowDraw:
        """What the draw of the token at `position` depends on."""
        params = self.params
        # A greedy row draws nothing, so its number is not worth its hash.
        greedy = self.path is DrawPath.greedy
        uniform = 0.0 if greedy else uniform_number(self.seed, position)
        # Smaller temperatures would overflow to infinity; they are greedy for all purposes.
        temperature = max(params.temperature, 1e-3)
        return RowDraw(self.path, temperature, self.top_k, params.top_p, params.min_p, uniform)


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


class _PendingLogprobs(NamedTuple):
    """Log-probabilities on their way to the host."""

    columns: list[Tensor]  # the four of `token_logprobs`, for the rows that ask
    asking: list[int]  # those rows, of the step's
    wanted: list[int | None]  # how many of the likeliest each of the step's rows asks for
    chosen: dict[int, Sequence[int]]  # tokens that rows ask for instead
    chosen_values: Tensor | None  # [C, W], of those rows in order, as far as each has tokens

    def read(self) -> list[TokenLogprobs | None]:
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


class PendingTokens:
    """A step's tokens, which the device may still be working on.

    `token_ids` [R] int64 lies on the device and is overwritten by the next launch; the copy to the
    host starts at once.
    """

    def __init__(
        self,
        token_ids: Tensor,
        logprobs: _PendingLogprobs | None,
        grammars: Sequence[GrammarRow | None] = (),
    ) -> None:
        self.token_ids = token_ids
        self._logprobs = logprobs
        self._grammars = grammars  # of the step's rows; empty = none has one
        self._copied: torch.cuda.Event | None = None
        if token_ids.device.type == "cpu":
            self._host = token_ids.clone()
        else:
            self._host = torch.empty_like(token_ids, device="cpu", pin_memory=True)
            self._host.copy_(token_ids, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> StepResult:
        """The tokens; waits for the device, and tells the rows' grammars."""
        if self._copied is not None:
            self._copied.synchronize()
        logprobs = None if self._logprobs is None else self._logprobs.read()
        result = StepResult(self._host.tolist(), logprobs)
        for index, grammar in enumerate(self._grammars):
            ending = None if grammar is None else grammar.take(result.token_ids[index])
            if ending is not None:
                result.endings[index] = ending
        return result


class Sampler:
    """Owns the sampling state of every row.

    A step goes through it twice: `stage` before the model runs, `launch` with its logits.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        drawer: Drawer | None = None,
        matchers: MatcherSource | None = None,
    ) -> None:
        """
        Args:
            max_num_seqs: rows.
            vocab_size: V.
            device: of the logits.
            drawer: draws the tokens; None = row by row, as a CPU does it best.
            matchers: gives a request's grammar matcher; None = no request has a grammar.
        """
        self._rows: list[_Row | None] = [None] * max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._limits = TokenLimits(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device)
        self.grammars = GrammarMasks(vocab_size=vocab_size, device=device, matchers=matchers)
        self._drawer = drawer or RowDrawer()
        self._staged: list[_Row] = []
        self._staged_rows: list[int] = []
        self._positions: list[int] = []

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """A sequence takes the row; `output_token_ids` is not empty when it resumes."""
        state = _Row(request, output_token_ids, self._vocab_size, self._device)
        state.grammar = self.grammars.admit(request, output_token_ids)
        self._rows[row] = state
        self._limits.admit(row, request, output_token_ids)

    def stage(self, rows: list[int], positions: list[int]) -> None:
        """Take a step's rows, and their parameters to the device.

        Args:
            rows: the R rows that sample.
            positions: where in its sequence each new token goes.
        """
        self._staged = [self._state(row) for row in rows]
        self._staged_rows = rows
        self._positions = positions
        self._drawer.stage(
            [state.draw(place) for state, place in zip(self._staged, positions, strict=True)]
        )

    @property
    def waits_for_tokens(self) -> bool:
        """Whether `launch` must wait until the tokens of earlier steps are read."""
        grammars = (state.grammar for state in self._staged)
        return any(grammar is not None and grammar.num_unread for grammar in grammars)

    def launch(self, logits: Tensor) -> PendingTokens:
        """Pick one token for each staged row, without waiting for the device.

        Args:
            logits: [R, V] float32; changed in place.
        """
        states = self._staged
        raw = logits.clone() if any(_asks_both(state) for state in states) else logits
        for index, state in enumerate(states):
            if state.edits:
                self._edit(logits[index], state, self._positions[index])
        limited_rows = None
        if any(state.is_limited for state in states):
            limited_rows = torch.tensor(self._staged_rows, device=self._device)
            self._limits.apply(logits, limited_rows)
        grammars = [
            None if state.grammar is None or state.grammar.is_free else state.grammar
            for state in states
        ]
        if any(grammars):
            self.grammars.apply(logits, grammars, self._positions)
        token_ids = self._drawer.run(logits)
        if limited_rows is not None:
            self._limits.advance(limited_rows, token_ids)
        for index, state in enumerate(states):
            if state.counts is not None:
                # A slice, because indexing by one element would wait for the device.
                state.counts[token_ids[index : index + 1]] += 1
        if raw is not logits:
            # A beam search continues with what is likeliest after the edits.
            for index, state in enumerate(states):
                if state.is_beam:
                    raw[index] = logits[index]
        return PendingTokens(
            token_ids, _logprobs(raw, token_ids, states), grammars if any(grammars) else ()
        )

    def sample(self, logits: Tensor, rows: list[int], positions: list[int]) -> StepResult:
        """`stage`, `launch` and `read` in one."""
        self.stage(rows, positions)
        return self.launch(logits).read()

    def _state(self, row: int) -> _Row:
        state = self._rows[row]
        assert state is not None, f"row {row} is sampled before it was admitted"
        return state

    @staticmethod
    def _edit(logits: Tensor, state: _Row, position: int) -> None:
        if state.bias is not None:
            ids, values = state.bias
            logits[ids] += values
        if state.counts is not None and state.in_prompt is not None:
            apply_penalties(
                logits,
                state.counts,
                state.in_prompt,
                repetition=state.params.repetition_penalty,
                presence=state.params.presence_penalty,
                frequency=state.params.frequency_penalty,
            )
        # A grammar's mask does this itself, as far as the grammar has another way.
        is_early = position < state.min_length and (
            state.grammar is None or state.grammar.matcher is None
        )
        if state.stop_ids is not None and is_early:
            logits[state.stop_ids] = float("-inf")


def _logprobs(raw: Tensor, token_ids: Tensor, states: list[_Row]) -> _PendingLogprobs | None:
    """Of the rows that ask, still on the device."""
    wanted = [state.num_reported for state in states]
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
        index: state.params.logprob_token_ids or ()
        for index, state in enumerate(states)
        if state.chosen_ids is not None
    }
    return _PendingLogprobs(columns, asking, wanted, chosen, _chosen(raw, states))


def _chosen(raw: Tensor, states: list[_Row]) -> Tensor | None:
    """[C, W] log-probabilities of the tokens that C of the rows ask for."""
    rows = [index for index, state in enumerate(states) if state.chosen_ids is not None]
    if not rows:
        return None
    ids = [state.chosen_ids for state in states if state.chosen_ids is not None]
    step = rows_at_once(raw.shape[-1])
    where = torch.tensor(rows, device=raw.device).split(step)
    padded = pad_sequence(ids, batch_first=True).split(step)
    return torch.cat(
        [chosen_logprobs(raw[some], these) for some, these in zip(where, padded, strict=True)]
    )


def sampling_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """The most bytes that logits and sampling take at once, when every row asks for everything.

    Per logit: as the head computes it (2), as float32 (4), where sampling reads it (4), as it was
    before the edits (4); a penalised row's counts (4) and prompt (1); allowed tokens (1, and 2 at
    work). Besides these, what a draw works on.
    """
    return 22 * max_num_seqs * vocab_size + draw_bytes(max_num_seqs, vocab_size)


def _asks_both(state: _Row) -> bool:
    """Log-probabilities come from the raw logits, so those must survive the edits."""
    return state.edits and state.num_reported is not None and not state.is_beam
