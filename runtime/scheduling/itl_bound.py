"""The inter-token-latency target: how many prompt tokens fit into a step that has decodes.

Every decoding sequence waits for the whole step. So a step with decodes takes only as many prompt
tokens as keep its predicted seconds within the target.
"""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.runtime.costs.cost_table import Chunk, CostTable
from ostinato.runtime.scheduling.sequences.sequence import Sequence

__all__ = ("ItlBound", "StepAllowance")


class StepAllowance:
    """The prompt tokens that fit into one step beside its decodes.

    `largest` says how long a chunk may be. `take` adds a chunk to the step.

    Args:
        costs: the step-cost table.
        target_s: seconds that the step may take.
        least_chunk: tokens of the first chunk if not even one token fits.
        num_decodes: decoding sequences of the step, at least 1.
        context: mean number of cached tokens of these sequences.
        num_scored: decodes whose log-probabilities are requested.

    Attributes:
        num_chunks: chunks that the step has so far.
    """

    __slots__ = (
        "_costs",
        "_least_chunk",
        "_num_seqs",
        "_num_tokens",
        "_seconds_left",
        "num_chunks",
    )

    def __init__(
        self,
        costs: CostTable,
        target_s: float,
        *,
        least_chunk: int,
        num_decodes: int,
        context: float,
        num_scored: int = 0,
    ) -> None:
        self._costs = costs
        self._least_chunk = least_chunk
        self._num_tokens = self._num_seqs = num_decodes
        self.num_chunks = 0
        self._seconds_left = target_s - costs.decode_surcharge(num_decodes, context)
        if num_scored:
            self._seconds_left -= num_scored * costs.seconds_per_score

    def largest(self, limit: int, start: int, *, has_scores: bool = False) -> int:
        """Tokens of a chunk from position `start` that keep the step within the target.

        Args:
            limit: at most this many.
            start: tokens of the sequence that are in the cache already.
            has_scores: the tokens' log-probabilities are requested.

        Returns:
            At most `limit`; 0 if no token fits and the step has a chunk already. The first chunk
            gets up to `least_chunk` tokens even if none fits. So prompts advance although the
            decodes alone miss the target.
        """
        if limit < 1 or self._fits(limit, start, has_scores=has_scores):
            return max(limit, 0)
        fits, too_many = 0, limit
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._fits(middle, start, has_scores=has_scores):
                fits = middle
            else:
                too_many = middle
        if fits or self.num_chunks:
            return fits
        return min(limit, self._least_chunk)

    def fits(self, num_tokens: int, start: int) -> bool:
        """Whether a chunk keeps the step within the target."""
        return self._fits(num_tokens, start)

    def take(self, chunk: Chunk) -> None:
        """Add a chunk to the step."""
        self._num_tokens += chunk.num_tokens
        self._num_seqs += 1
        self.num_chunks += 1
        self._seconds_left -= self._costs.chunk_surcharge(chunk)

    def _fits(self, num_tokens: int, start: int, *, has_scores: bool = False) -> bool:
        costs = self._costs
        seconds = costs.step_seconds(self._num_tokens + num_tokens, self._num_seqs + 1, 0)
        num_scored = num_tokens if has_scores else 0
        seconds += costs.chunk_surcharge(Chunk(num_tokens, start, num_scored))
        return seconds <= self._seconds_left


class ItlBound:
    """The inter-token-latency target of an engine.

    Args:
        costs: the step-cost table.
        target_s: seconds that a step with decodes may take.
        least_chunk: prompt tokens that a step gets even if its decodes alone miss the target.
    """

    def __init__(self, costs: CostTable, target_s: float, *, least_chunk: int) -> None:
        self._costs = costs
        self._target_s = target_s
        self._least_chunk = least_chunk

    def open(self, running: Iterable[Sequence]) -> StepAllowance | None:
        """The allowance of a step of these sequences; None if no sequence decodes."""
        decodes = [s for s in running if s.is_decoding]
        if not decodes:
            return None
        context = sum(s.num_computed_tokens for s in decodes) / len(decodes)
        num_scored = sum(s.has_logprobs for s in decodes)
        return self.allowance(len(decodes), context, num_scored)

    def allowance(self, num_decodes: int, context: float, num_scored: int = 0) -> StepAllowance:
        """The allowance of a step with `num_decodes` decodes, whose mean context is `context`.

        Args:
            num_scored: decodes whose log-probabilities are requested.
        """
        return StepAllowance(
            self._costs,
            self._target_s,
            least_chunk=self._least_chunk,
            num_decodes=num_decodes,
            context=context,
            num_scored=num_scored,
        )
