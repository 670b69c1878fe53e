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
        self._is_indexed = False  # whether the whole prediction is
        self._min_match = min_match
        self._place = 0  # index of the token that should follow
        self._num_seen = num_prompt_tokens  # tokens of the sequence when `_place` was set
        self._num_equal = MAX_MATCH  # number of last tokens that were as predicted

    def propose(self, token_ids: Sequence[int], key: int, most: int) -> Draft | None:
        """The next predicted tokens; None at the end of the prediction.

        Args:
            token_ids: the sequence.
            key: `key_of` the sequence and `min_match`.
            most: the largest number of tokens to return.
        """
        if not self._is_indexed:
            self._is_indexed = self._index.take(len(self._predicted))
        self._follow(token_ids, key)
        draft = self._predicted[self._place : self._place + most]
        if not draft:
            return None
        return Draft(draft, DraftSource.prediction, self._num_equal)

    def _follow(self, token_ids: Sequence[int], key: int) -> None:
        predicted, place, num_equal = self._predicted, self._place, self._num_equal
        num_tokens, num_predicted = len(token_ids), len(predicted)
        for index in range(self._num_seen, num_tokens):
            is_equal = place < num_predicted and predicted[place] == token_ids[index]
            num_equal = min(MAX_MATCH, num_equal + 1) if is_equal else 0
            place += 1
        self._num_seen = num_tokens
        num_answer = num_tokens - self._num_prompt_tokens
        if num_equal < MAX_MATCH and num_answer >= self._min_match:
            most = min(num_answer, MAX_MATCH)
            found = self._index.find(token_ids, key, near=place, most=most)
            if found is not None and found.length > num_equal:
                place, num_equal = found
        self._place, self._num_equal = place, num_equal
