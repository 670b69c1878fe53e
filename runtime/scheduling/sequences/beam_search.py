"""Beam search: which beams continue with which tokens, and which finished sequences are the best.

This is the search of one request, without blocks, rows or steps. The rules are those of
`transformers` (`GenerationMixin._beam_search`). W is the number of beams. The continuations of all
beams are looked at, likeliest first. One that ends with a stop token is kept as finished if it is
among the first W. The first W others are the next beams. `early_stopping` has the values of
transformers: False is the heuristic of Wu et al. 2016.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from typing import NamedTuple

from ostinato.runtime.types.outputs import BeamOutput, FinishReason, TokenLogprobs
from ostinato.runtime.types.request import Request

__all__ = ("Beam", "BeamSearch", "Move", "num_candidates")

# A lower log-probability marks a continuation that is a bad word. Such a continuation is used only
# if there is no other.
_LEAST_LOGPROB = -1e20


def num_candidates(request: Request) -> int:
    """How many continuations of each beam the search needs, or reports if these are more.

    All next beams can continue the same beam, and all stop tokens can be likelier than these.
    """
    sampling = request.sampling
    return max(sampling.num_candidates + len(_stop_token_ids(request)), sampling.logprobs or 0)


def _stop_token_ids(request: Request) -> frozenset[int]:
    eos_token_ids = () if request.sampling.ignore_eos else request.eos_token_ids
    return frozenset(request.sampling.stop_token_ids).union(eos_token_ids)


class Beam:
    """One of the token sequences that compete in a search.

    Attributes:
        search: the search that it belongs to.
        cumulative_logprob: the sum of the log-probabilities of its output tokens.
        token_ids: its output tokens.
        logprobs: one per output token.
        candidates: its likeliest continuations; None until the step that finds them is read.
        is_moved: the beam took over a row of another beam. The runner does not have its last token
            and its block table yet.
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
        """A new beam with one token more. This beam is not changed."""
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
    """The search of one request.

    Args:
        request: a request with `sampling.use_beam_search`.
        max_new_tokens: the largest number of output tokens.

    Attributes:
        beams: the current beams, best first; one at the beginning.
        is_done: whether the search has ended.
    """

    def __init__(self, request: Request, max_new_tokens: int) -> None:
        sampling = request.sampling
        self._sampling = sampling
        self._width = sampling.num_candidates
        self._eos_token_ids = frozenset(() if sampling.ignore_eos else request.eos_token_ids)
        self._stop_token_ids = _stop_token_ids(request)
        self._max_new_tokens = max_new_tokens
        self._length = 0  # output tokens of every beam
        self._finished: list[BeamOutput] = []  # best first
        self._can_improve = True
        self.beams = [Beam(self)]
        self.is_done = False

    @property
    def is_ready(self) -> bool:
        """Whether the candidates of every beam have arrived."""
        return all(beam.candidates is not None for beam in self.beams)

    def advance(self) -> list[Move]:
        """Decide the next token of every beam. Call it when `is_ready` is true.

        Returns:
            The moves that make the next beams, best first; empty = the search is done. The caller
            replaces `beams`.
        """
        self._length += 1
        moves = self._best_moves()
        is_last = self._length >= self._max_new_tokens
        alive = [move for move in moves if not is_last and not self._stops(move)][: self._width]
        ended = [move for move in moves[: self._width] if is_last or self._stops(move)]
        is_full = len(self._finished) == self._width
        if self._can_improve and not (is_full and self._sampling.early_stopping is True):
            self._finished += map(self._finish, ended)
            # The sort is stable: of equal scores, the one found first stays first.
            self._finished.sort(key=lambda one: one.score, reverse=True)
            del self._finished[self._width :]
        self._can_improve = self._can_improve and self._may_improve(alive)
        is_full = len(self._finished) == self._width
        if not (alive and self._can_improve) or (is_full and self._sampling.early_stopping is True):
            self.is_done = True
            return []
        return alive

    def results(self) -> list[BeamOutput]:
        """The n best finished sequences, best first. There can be fewer than n."""
        return self._finished[: self._sampling.n]

    def _best_moves(self) -> list[Move]:
        """The likeliest continuations of all beams, best first, up to the W-th without stop token.

        The continuations of each beam are sorted already. A lazy merge reads only the few that are
        needed; W beams have W**2 or more.
        """
        count = self._sampling.logprobs or 0
        moves_of_beams = [_moves(beam, count) for beam in self.beams]
        merged = merge(*moves_of_beams, key=lambda move: move.cumulative_logprob, reverse=True)
        moves: list[Move] = []
        num_alive = 0
        for move in merged:
            moves.append(move)
            num_alive += not self._stops(move)
            if num_alive == self._width:
                break
        return [move for move in moves if move.cumulative_logprob > _LEAST_LOGPROB] or moves

    def _stops(self, move: Move) -> bool:
        return move.token_id in self._stop_token_ids

    def _may_improve(self, alive: list[Move]) -> bool:
        """Whether a beam can still reach a better score than the worst finished sequence."""
        if len(self._finished) < self._width or not alive:
            return True
        penalty = self._sampling.length_penalty
        # The best score that the best beam can reach. "never" assumes the best possible length.
        is_never = self._sampling.early_stopping == "never"
        length = self._max_new_tokens if is_never and penalty > 0.0 else self._length
        return alive[0].cumulative_logprob / length**penalty > self._finished[-1].score

    def _finish(self, move: Move) -> BeamOutput:
        stops = self._stops(move)
        is_eos = move.token_id in self._eos_token_ids
        logprobs = None
        if self._sampling.logprobs is not None:
            logprobs = [*move.beam.logprobs, move.logprobs]
        return BeamOutput(
            token_ids=[*move.beam.token_ids, move.token_id],
            score=move.cumulative_logprob / self._length**self._sampling.length_penalty,
            finish_reason=FinishReason.stop if stops else FinishReason.length,
            stop_reason=move.token_id if stops and not is_eos else None,
            logprobs=logprobs,
        )


def _moves(beam: Beam, num_reported: int) -> Iterator[Move]:
    """The continuations of one beam, best first.

    Args:
        beam: a beam whose candidates have arrived.
        num_reported: each continuation reports this many of the likeliest tokens.
    """
    candidates = beam.candidates
    assert candidates is not None, "advanced before every beam had its candidates"
    top_ids = candidates.top_ids[:num_reported]
    top_logprobs = candidates.top_logprobs[:num_reported]
    for rank, (token_id, logprob) in enumerate(
        zip(candidates.top_ids, candidates.top_logprobs, strict=True), 1
    ):
        if logprob == float("-inf"):
            return
        entry = TokenLogprobs(logprob, rank, top_ids, top_logprobs)
        yield Move(beam.cumulative_logprob + logprob, beam, token_id, entry)
