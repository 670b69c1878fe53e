"""Beam search: which beams go on with which tokens, and which finished sequences are the best.

Pure bookkeeping of one request, without blocks, rows or steps: candidates in, moves out. The rules
are those of `transformers` (`GenerationMixin._beam_search`): the W * (1 + stop tokens) likeliest
continuations of all beams together are looked at; those that stop and are among the first W are
kept as finished; the first W others live on. Early stopping as in Wu et al. 2016 and its two
neighbours, `early_stopping`.
"""

from __future__ import annotations

from typing import NamedTuple

from ostinato.runtime.types.outputs import BeamOutput, FinishReason, TokenLogprobs
from ostinato.runtime.types.request import Request

__all__ = ("Beam", "BeamSearch", "Move", "num_candidates")

# Below it a continuation is one that only a last resort makes possible: a bad word.
_LEAST_LOGPROB = -1e20


def num_candidates(request: Request) -> int:
    """How many of a beam's likeliest continuations the search has to see."""
    sampling = request.sampling
    stop_token_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_token_ids.update(request.eos_token_ids)
    return max(2, 1 + len(stop_token_ids)) * sampling.num_candidates


class Beam:
    """One of the sequences that compete.

    Attributes:
        search: the search that it belongs to.
        cumulative_logprob: of its output tokens.
        token_ids: its output tokens.
        logprobs: one per output token.
        candidates: its likeliest continuations; None while the step that finds them is not back.
        is_moved: its last token, or its block table, is not known to the runner.
    """

    __slots__ = (
        "candidates",
        "cumulative_logprob",
        "is_moved",
        "logprobs",
        "search",
        "token_ids",
    )

    def __init__(self, search: BeamSearch) -> None:
        self.search = search
        self.cumulative_logprob = 0.0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.candidates: TokenLogprobs | None = None
        self.is_moved = False

    def continued(self, move: Move) -> Beam:
        """A beam with one token more; this one stays as it is."""
        beam = Beam(self.search)
        beam.cumulative_logprob = move.cumulative_logprob
        beam.token_ids = [*self.token_ids, move.token_id]
        beam.logprobs = [*self.logprobs, move.logprobs]
        beam.is_moved = True
        return beam


class Move(NamedTuple):
    """A continuation of a beam."""

    cumulative_logprob: float
    beam: Beam
    token_id: int
    logprobs: TokenLogprobs


class BeamSearch:
    """One request's search.

    Args:
        request: with `sampling.use_beam_search`.
        max_new_tokens: its longest output.

    Attributes:
        beams: those that live, best first; one at the beginning.
        is_done: no beam lives on.
    """

    def __init__(self, request: Request, max_new_tokens: int) -> None:
        sampling = request.sampling
        self._sampling = sampling
        self._width = sampling.num_candidates
        self._num_looked_at = num_candidates(request)
        self._eos_token_ids = frozenset(() if sampling.ignore_eos else request.eos_token_ids)
        self._stop_token_ids = frozenset(sampling.stop_token_ids) | self._eos_token_ids
        self._max_new_tokens = max_new_tokens
        self._length = 0  # output tokens of every beam
        self._finished: list[BeamOutput] = []  # best first
        self._can_improve = True
        self.beams = [Beam(self)]
        self.is_done = False

    @property
    def is_ready(self) -> bool:
        """Whether the candidates of every beam are there."""
        return all(beam.candidates is not None for beam in self.beams)

    def advance(self) -> list[Move]:
        """Decide the next token of every beam, once `is_ready`.

        Returns:
            What lives on, best first; `beams` are still the old ones. Empty = `is_done`.
        """
        self._length += 1
        moves = self._best_moves()
        is_last = self._length >= self._max_new_tokens
        alive = [move for move in moves if not is_last and not self._stops(move)][: self._width]
        ended = [move for move in moves[: self._width] if is_last or self._stops(move)]
        is_full = len(self._finished) == self._width
        if self._can_improve and not (is_full and self._sampling.early_stopping is True):
            self._finished += map(self._finish, ended)
            # Stable: of equals the one that was found first stays before the other.
            self._finished.sort(key=lambda one: one.score, reverse=True)
            del self._finished[self._width :]
        self._can_improve = self._can_improve and self._may_improve(alive)
        is_full = len(self._finished) == self._width
        if not (alive and self._can_improve) or (is_full and self._sampling.early_stopping is True):
            self.is_done = True
            return []
        return alive

    def results(self) -> list[BeamOutput]:
        """The n best sequences, best first: fewer when there are no more."""
        return self._finished[: self._sampling.n]

    def _best_moves(self) -> list[Move]:
        """The likeliest continuations of all beams, best first."""
        moves = []
        for beam in self.beams:
            candidates = beam.candidates
            assert candidates is not None, "advanced before every beam had its candidates"
            for rank, (token_id, logprob) in enumerate(
                zip(candidates.top_ids, candidates.top_logprobs, strict=True), 1
            ):
                if logprob == float("-inf"):
                    break
                entry = TokenLogprobs(logprob, rank, candidates.top_ids, candidates.top_logprobs)
                moves.append(Move(beam.cumulative_logprob + logprob, beam, token_id, entry))
        moves.sort(key=lambda move: move.cumulative_logprob, reverse=True)
        possible = [move for move in moves if move.cumulative_logprob > _LEAST_LOGPROB]
        return (possible or moves)[: self._num_looked_at]

    def _stops(self, move: Move) -> bool:
        return move.token_id in self._stop_token_ids

    def _may_improve(self, alive: list[Move]) -> bool:
        """Whether a beam may still come to a better score than the worst finished one."""
        if len(self._finished) < self._width or not alive:
            return True
        penalty = self._sampling.length_penalty
        # What the best one would score now, or "never": at the length that suits it best.
        hopes = self._sampling.early_stopping == "never" and penalty > 0.0
        length = self._max_new_tokens if hopes else self._length
        return alive[0].cumulative_logprob / length**penalty > self._finished[-1].score

    def _finish(self, move: Move) -> BeamOutput:
        stops = self._stops(move)
        is_eos = move.token_id in self._eos_token_ids
        count = self._sampling.logprobs
        logprobs = None
        if count is not None:
            logprobs = [
                TokenLogprobs(one.logprob, one.rank, one.top_ids[:count], one.top_logprobs[:count])
                for one in (*move.beam.logprobs, move.logprobs)
            ]
        return BeamOutput(
            token_ids=[*move.beam.token_ids, move.token_id],
            score=move.cumulative_logprob / self._length**self._sampling.length_penalty,
            finish_reason=FinishReason.stop if stops else FinishReason.length,
            stop_reason=move.token_id if stops and not is_eos else None,
            logprobs=logprobs,
        )
