"""Drafts tokens from the text that a request predicts for its answer (OpenAI's `prediction`)."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.runtime.speculation.proposer import Draft, DraftSource
from ostinato.runtime.speculation.text_index import MAX_MATCH, TextIndex

__all__ = ("PredictionFollower",)


class PredictionFollower:
    """Keeps the place in the prediction that corresponds to the end of the answer.

    Each new token of the answer advances the place by one, even if the token differs from the
    prediction. After a difference, the last tokens of the answer are looked up in the prediction.
    If they are found, the place moves behind them.

    Args:
        predicted: token ids of the prediction.
        num_prompt_tokens: tokens before the answer.
        min_match: tokens that must match to move the place.
    """

    def __init__(self, predicted: Sequence[int], *, num_prompt_tokens: int, min_match: int) -> None:
        self._predicted = predicted
        self._num_prompt_tokens = num_prompt_tokens
        self._index = TextIndex(predicted, min_match)
        self._place = 0  # index of the token that should follow
        self._num_seen = num_prompt_tokens  # tokens of the sequence when `_place` was set
        self._num_equal = MAX_MATCH  # number of last tokens that were as predicted

    def propose(self, token_ids: Sequence[int], most: int) -> Draft | None:
        """The next predicted tokens; None at the end of the prediction."""
        self._index.take(len(self._predicted))
        self._follow(token_ids)
        draft = self._predicted[self._place : self._place + most]
        if not draft:
            return None
        return Draft(draft, DraftSource.prediction, self._num_equal)

    def _follow(self, token_ids: Sequence[int]) -> None:
        num_tokens = len(token_ids)
        for token in token_ids[self._num_seen :]:
            is_equal = self._predicted[self._place : self._place + 1] == [token]
            self._num_equal = min(MAX_MATCH, self._num_equal + 1) if is_equal else 0
            self._place += 1
        self._num_seen = num_tokens
        if self._num_equal < MAX_MATCH and num_tokens > self._num_prompt_tokens:
            answer = token_ids[max(self._num_prompt_tokens, num_tokens - MAX_MATCH) :]
            found = self._index.find(answer, near=self._place)
            if found is not None and found.length > self._num_equal:
                self._place, self._num_equal = found
