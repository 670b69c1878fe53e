"""The sampler: turns a step's logits into tokens, and keeps the sampling state of every row.

Order: log-probabilities from the raw logits; logits processors (logit bias, penalties, minimum
    length, allowed tokens and bad words, rules of transcripts); grammar; temperature; top-k, top-p,
    min-p; one draw keyed by (seed, position).

A sequence with k drafts has 1 + k rows of logits. Its tokens are drawn one after the other, each
in the same way as without drafts, up to the first token that differs from its draft. So for equal
logits, drafts change neither tokens nor log-probabilities. On a GPU all tokens of a step are drawn
at once, unless a draw depends on the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import accumulate

import torch
from torch import Tensor

from ostinato.graphs.sampling_graph import EagerSampler, TokenSampler
from ostinato.ops.sampling.sample_rows import sampling_workspace_bytes
from ostinato.runtime.sampling.grammar_masks import MASKS_S, GrammarMasks, MatcherSource
from ostinato.runtime.sampling.grammar_rows import GrammarRow, forced_tokens
from ostinato.runtime.sampling.logits_processors import make_processors
from ostinato.runtime.sampling.pending_tokens import (
    PendingTokens,
    PendingVerification,
    VerifiedTokens,
)
from ostinato.runtime.sampling.sampled_row import SampledRow
from ostinato.runtime.sampling.to_device import to_device
from ostinato.runtime.sampling.token_logprobs import start_logprobs
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult

__all__ = ("Sampler", "sampling_bytes")


class Sampler:
    """Owns the sampling state of every row.

    A step calls `stage` before the model runs and `launch` with its logits.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        token_sampler: TokenSampler | None = None,
        matchers: MatcherSource | None = None,
        reports_forced: bool = False,
    ) -> None:
        """
        Args:
            max_num_seqs: number of rows.
            vocab_size: V.
            device: the device of the logits.
            token_sampler: samples the tokens. None = sample row by row, which is faster on a CPU.
            matchers: gives a request's grammar matcher; None = no request has a grammar.
            reports_forced: results include the tokens that grammars force.
        """
        self._reports_forced = reports_forced
        self._states: list[SampledRow | None] = [None] * max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._processors = make_processors(
            max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device
        )
        self.grammars = GrammarMasks(vocab_size=vocab_size, device=device, matchers=matchers)
        self._token_sampler = token_sampler or EagerSampler()
        self._staged: list[SampledRow] = []
        self._has_grammars = False  # whether a row of `_staged` has a `GrammarRow`
        self._reporting: list[int] = []  # indices into `_staged` of rows with log-probabilities
        self._rows: list[int] = []
        self._positions: list[int] = []
        self._drafts: list[list[int]] | None = None
        self._verifies_on_device = False  # whether the device compares the staged rows with drafts

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Note that a sequence takes the row; `output_token_ids` is its output so far."""
        grammar = self.grammars.admit(request, output_token_ids)
        state = SampledRow(request, grammar, self._vocab_size, self._device)
        for processor in self._processors:
            processor.admit(row, request, output_token_ids)
            state.is_edited = state.is_edited or processor.changes(row)
        self._states[row] = state

    def stage(
        self, rows: list[int], positions: list[int], drafts: list[list[int]] | None = None
    ) -> None:
        """Copy the parameters of a step's rows to the device.

        Args:
            rows: [R], for each row of logits the row of its sequence.
            positions: [R], the position of each drawn token in its sequence.
            drafts: the draft tokens of each sequence that samples; None = no sequence has any. A
                negative number stands for a token that only the device has.
        """
        self._staged = states = [self._state(row) for row in rows]
        self._has_grammars = any(state.grammar is not None for state in states)
        self._reporting = [
            i for i, state in enumerate(states) if state.reported.num_top is not None
        ]
        self._rows = rows
        self._positions = positions
        self._drafts = drafts
        self._verifies_on_device = (
            drafts is not None
            and self._device.type == "cuda"
            and not any(map(self._depends_on_output, range(len(rows))))
        )
        if drafts is None or self._only_draws or self._verifies_on_device:
            self._stage_draws(states, positions)

    @property
    def reports_logprobs(self) -> bool:
        """Whether `launch` computes log-probabilities of the staged rows."""
        return bool(self._reporting)

    @property
    def has_drafts(self) -> bool:
        """Whether `launch` verifies drafts of the staged rows."""
        return self._drafts is not None

    @property
    def waits_for_tokens(self) -> bool:
        """Whether `launch` must wait until the tokens of earlier steps are read."""
        if not self._has_grammars:
            return False
        grammars = (state.grammar for state in self._staged)
        return any(grammar is not None and grammar.num_unread for grammar in grammars)

    def launch(
        self,
        logits: Tensor,
        masks_s: float = MASKS_S,
        model_s: float = MASKS_S,
        following: Tensor | None = None,
    ) -> PendingTokens | PendingVerification | VerifiedTokens:
        """Draw the tokens of the staged rows.

        It waits for the device only if there are drafts, and draws of the step depend on tokens
        before them.

        Args:
            logits: [R, V] float32, or the columns of this rank; changed in place.
            masks_s: seconds after which no further grammar masks are begun. Rows without a mask get
                no token (`StepResult.counts`).
            model_s: seconds that the model has taken for the step.
            following: [R] int64 on a GPU, for each row the draft of the token that it draws, if it
                has one. Not read without drafts.
        """
        self.grammars.begin_step(masks_s, model_s)
        if logits.shape[1] != self._vocab_size and (self._reporting or not self._only_draws):
            logits = self._token_sampler.whole(logits)
        drafts = self._drafts
        if drafts is not None and not self._verifies_on_device:
            return self._verify(logits, _on_host(drafts, following))
        states = self._staged
        raw = logits.clone() if any(map(self._reports_before, self._reporting)) else logits
        token_ids, masks, held = self._pick(logits, self._rows, states, self._positions)
        if raw is not logits:
            # A beam search needs the likeliest tokens after the logits were changed.
            for index, state in enumerate(states):
                if state.is_beam:
                    raw[index] = logits[index]
        logprobs = None
        if self._reporting:
            logprobs = start_logprobs(raw, token_ids, [state.reported for state in states])
        if drafts is not None:
            assert following is not None, "the device has the drafts"
            return PendingVerification(token_ids, following, list(map(len, drafts)), logprobs)
        return PendingTokens(token_ids, logprobs, masks, held, reports_forced=self._reports_forced)

    def sample(self, logits: Tensor, rows: list[int], positions: list[int]) -> StepResult:
        """Call `stage`, `launch` and `read`."""
        self.stage(rows, positions)
        return self.launch(logits).read()

    def _verify(self, logits: Tensor, drafts: list[list[int]]) -> VerifiedTokens:
        """Draw every sequence's tokens until one differs from its draft.

        In each round, every unfinished sequence draws its next token. A sequence whose draws do not
        depend on its output draws all its tokens in the first round. If there is no time for a
        sequence's next mask, it keeps the tokens that it has.
        """
        if self._device.type == "cuda":
            # The token sampler copies the rows of each round to the memory of the captured logits.
            logits = logits.clone()
        starts = [0, *accumulate(1 + len(guesses) for guesses in drafts)]
        if self._only_draws:
            return self._verified(logits, starts, self._draw_all(logits, drafts), {})
        tokens: list[list[int]] = [[] for _ in drafts]
        endings: dict[tuple[int, int], str] = {}  # by (sequence, index of the token)
        open_seqs = list(range(len(drafts)))
        while open_seqs:
            chosen: list[int] = []  # rows of logits of this round
            counts: list[int] = []  # rows of each sequence among `chosen`
            for seq in open_seqs:
                first = starts[seq] + len(tokens[seq])
                end = first + 1 if self._depends_on_output(first) else starts[seq + 1]
                chosen += range(first, end)
                counts.append(end - first)
            drawn, masks, held = self._pick_some(logits, chosen)
            still_open: list[int] = []
            begin = 0
            for seq, count in zip(open_seqs, counts, strict=True):
                if begin in held:  # a row with a mask draws one token a round
                    begin += count
                    continue
                for token, mask in zip(
                    drawn[begin : begin + count], masks[begin : begin + count], strict=True
                ):
                    index = len(tokens[seq])
                    tokens[seq].append(token)
                    ending = None if mask is None else mask.take(token)
                    if ending is not None:
                        endings[seq, index] = ending
                    if ending is not None or drafts[seq][index : index + 1] != [token]:
                        break
                else:
                    still_open.append(seq)
                begin += count
            open_seqs = still_open
        return self._verified(logits, starts, tokens, endings)

    def _draw_all(self, logits: Tensor, drafts: list[list[int]]) -> list[list[int]]:
        """The tokens of `_verify` if no draw depends on the tokens before it: one round.

        The rounds of `_verify` find the same tokens, which a test compares, and take a tenth of a
        millisecond longer.
        """
        drawn: list[int] = self._token_sampler.run(logits).tolist()
        tokens: list[list[int]] = []
        begin = 0
        for guesses in drafts:
            end = begin + 1
            for guess in guesses:
                if drawn[end - 1] != guess:
                    break
                end += 1
            tokens.append(drawn[begin:end])
            begin += 1 + len(guesses)
        return tokens

    def _verified(
        self,
        logits: Tensor,
        starts: list[int],
        tokens: list[list[int]],
        endings: dict[tuple[int, int], str],
    ) -> VerifiedTokens:
        """The result of the verification. `logits` are raw, except in the rows of beams."""
        flat = [token for some in tokens for token in some]
        counts = list(map(len, tokens))
        logprobs = None
        if self._reporting:
            kept = [
                start + index
                for start, count in zip(starts, counts, strict=False)
                for index in range(count)
            ]
            where, ids = to_device(kept, self._device), to_device(flat, self._device)
            reported = [self._staged[index].reported for index in kept]
            logprobs = start_logprobs(logits[where], ids, reported)
        begins = [0, *accumulate(counts)]
        last = [some[-1] if some else 0 for some in tokens]  # 0 is not read: the host has the token
        forced: dict[int, list[int]] = {}
        if self._reports_forced and self._has_grammars:
            forced = forced_tokens(self._staged[start].mask for start in starts[:-1])
        return VerifiedTokens(
            to_device(last, self._device) if self._device.type == "cuda" else last,
            flat,
            counts,
            {begins[seq] + index: ending for (seq, index), ending in endings.items()},
            logprobs,
            forced,
        )

    def _pick_some(
        self, logits: Tensor, chosen: list[int]
    ) -> tuple[list[int], Sequence[GrammarRow | None], Set[int]]:
        """Like `_pick`, for some rows of the logits. Only the rows of beams are changed."""
        states = [self._staged[index] for index in chosen]
        positions = [self._positions[index] for index in chosen]
        is_read_only = not any(state.is_beam or state.changes_logits for state in states)
        if is_read_only and chosen[-1] + 1 == len(chosen):
            part = logits[: len(chosen)]  # all rows: a copy would take longer than the draws
        else:
            part = logits[to_device(chosen, self._device)]
        self._stage_draws(states, positions)
        token_ids, masks, held = self._pick(
            part, [self._rows[index] for index in chosen], states, positions
        )
        for place, state in enumerate(states):
            if state.is_beam:
                logits[chosen[place]] = part[place]
        return token_ids.tolist(), masks or [None] * len(chosen), held

    def _pick(
        self, logits: Tensor, rows: list[int], states: list[SampledRow], positions: list[int]
    ) -> tuple[Tensor, Sequence[GrammarRow | None], Set[int]]:
        """Change the logits by the rows' parameters, draw tokens, and note them.

        Returns:
            [R] int64 token ids. The mask state of each row, empty if no row was masked. The indices
            of rows whose masks were not made in time; their tokens are void.
        """
        processors = self._processors if any(state.is_edited for state in states) else ()
        for processor in processors:
            processor.apply(logits, rows, positions)
        masks = [state.mask for state in states] if self._has_grammars else []
        has_masks = any(mask is not None for mask in masks)
        held: Set[int] = frozenset()
        if has_masks:
            held = self.grammars.apply(logits, masks, positions)
        token_ids = self._token_sampler.run(logits)
        if processors:
            drawn, drawn_ids = rows, token_ids
            if held:
                kept = [index for index in range(len(rows)) if index not in held]
                drawn = [rows[index] for index in kept]
                drawn_ids = token_ids[to_device(kept, self._device)]
            for processor in processors:
                processor.advance(drawn, drawn_ids)
        return token_ids, masks if has_masks else (), held

    def _stage_draws(self, states: list[SampledRow], positions: list[int]) -> None:
        self._token_sampler.stage(
            [state.draw(place) for state, place in zip(states, positions, strict=True)]
        )

    def _depends_on_output(self, index: int) -> bool:
        """Whether the draw from a staged row of logits depends on tokens drawn before."""
        if self._staged[index].mask is not None:
            return True
        row = self._rows[index]
        return any(processor.depends_on_output(row) for processor in self._processors)

    @property
    def _only_draws(self) -> bool:
        """Whether nothing changes the logits of the staged rows, and draws depend on no output."""
        return not self._has_grammars and not any(s.is_edited or s.is_beam for s in self._staged)

    def _reports_before(self, index: int) -> bool:
        """Whether a staged row needs a copy of its logits before they are changed."""
        state = self._staged[index]
        return not state.is_beam and state.changes_logits

    def _state(self, row: int) -> SampledRow:
        state = self._states[row]
        assert state is not None, f"row {row} is sampled before it was admitted"
        return state


def _on_host(drafts: list[list[int]], following: Tensor | None) -> list[list[int]]:
    """The draft tokens of each sequence. Waits for the device if only the device has them."""
    if all(not draft or draft[-1] >= 0 for draft in drafts):
        return drafts
    assert following is not None, "the device has the drafts"
    token_ids: list[int] = following.tolist()
    begin, found = 0, list[list[int]]()
    for draft in drafts:
        found.append(token_ids[begin : begin + len(draft)])
        begin += 1 + len(draft)
    return found


def sampling_bytes(max_num_rows: int, max_num_seqs: int, vocab_size: int) -> int:
    """The largest memory of logits and sampling in bytes, if every row uses every parameter.

    Bytes per logit: the output of the LM head (2), float32 (4), the sampling input (4), the copy of
    unchanged logits (4), temporaries of allowed tokens (2). Bytes per sequence and vocabulary
    entry: counts (4) and prompt (1) for penalties, allowed tokens (1). The draw's memory is added.

    Args:
        max_num_rows: R, rows of logits of the largest step.
        max_num_seqs: S.
        vocab_size: V.
    """
    elements = 16 * max_num_rows + 6 * max_num_seqs
    return elements * vocab_size + sampling_workspace_bytes(max_num_rows, vocab_size)
