"""Detects an output that repeats itself: its end is one pattern, several times in a row.

This is vLLM's `repetition_detection`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.runtime.types.params import RepetitionDetectionParams

__all__ = ("REPETITION_REASON", "RepetitionDetector")

REPETITION_REASON = "repetition_detected"


class RepetitionDetector:
    """Reads one output token by token. The result does not depend on the grouping into steps.

    An output ends with `count` copies of a pattern of `size` tokens exactly if each of its last
    `size * (count - 1)` tokens equals the token `size` positions before it. So the detector counts,
    for each size, how many tokens at the end equal the token `size` positions before them. A new
    token extends the count of a size only if the same token occurs `size` positions before. So the
    work for a token is one dictionary entry for each of its occurrences in the last
    `max_pattern_size` tokens. This takes less than a microsecond in ordinary text. `min_count` does
    not change it.

    Args:
        params: parameters with `max_pattern_size` above 0.
        token_ids: an output so far; only its last `max_pattern_size * min_count` tokens are read.
    """

    __slots__ = ("_max_size", "_min_count", "_min_size", "_num_tokens", "_places", "_runs", "found")

    def __init__(self, params: RepetitionDetectionParams, token_ids: Iterable[int] = ()) -> None:
        self._max_size = params.max_pattern_size
        self._min_size = max(1, params.min_pattern_size)
        self._min_count = params.min_count
        self._num_tokens = 0
        self._places: dict[int, list[int]] = {}  # token id -> its positions, ascending
        self._runs: dict[int, int] = {}  # size -> the count that the docstring describes
        self.found = False  # whether the last tokens are a repetition
        for token_id in list(token_ids)[-self._max_size * self._min_count :]:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take in the next token."""
        places = self._places.setdefault(token_id, [])
        runs: dict[int, int] = {}
        found = False
        for place in reversed(places):
            size = self._num_tokens - place
            if size > self._max_size:
                break
            if size >= self._min_size:
                runs[size] = run = self._runs.get(size, 0) + 1
                found = found or run >= size * (self._min_count - 1)
        places.append(self._num_tokens)
        self._num_tokens += 1
        self._runs, self.found = runs, found
