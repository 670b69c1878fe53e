"""The drafter without a model (n-gram lookup): finds a sequence's last tokens in earlier text.

The draft is the text that followed these tokens. Up to three texts are searched: the request's
`prediction`, the sequence's own prompt and output, and the earlier answers of the engine. The
longest match gives the draft. Of equally long matches, the one in the first of these texts does.
Without a match the prediction still gives a draft, until it ends (prediction.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ostinato.conf.sections.speculation_schema import SpeculationConfig
from ostinato.runtime.speculation.answer_history import AnswerHistory
from ostinato.runtime.speculation.prediction import PredictionFollower
from ostinato.runtime.speculation.proposer import Draft, DraftSource
from ostinato.runtime.speculation.text_index import MAX_MATCH, TextIndex, key_of
from ostinato.runtime.types.request import Request

__all__ = ("TextDrafter",)


class _Texts:
    """The texts of one request in which its last tokens are looked up."""

    __slots__ = ("own", "prediction")

    def __init__(self, own: TextIndex | None, prediction: PredictionFollower | None) -> None:
        self.own = own
        self.prediction = prediction


class TextDrafter:
    """Implements `Proposer`.

    Args:
        config: the section `speculation`. Its method decides which texts are searched.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._history: AnswerHistory | None = None
        if config.drafter.uses_history:
            self._history = AnswerHistory(config.history_tokens, config.min_match)
        self._texts: dict[str, _Texts] = {}

    @property
    def max_drafts(self) -> int:
        return self._config.max_tokens

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        texts = self._texts.get(request.request_id)
        if texts is None:
            texts = self._texts[request.request_id] = self._begin(request, token_ids)
        key = key_of(token_ids, self._config.min_match)
        best = None
        if texts.prediction is not None:
            best = texts.prediction.propose(token_ids, key, most)
        if texts.own is not None:
            texts.own.take(len(token_ids))
        if best is not None and best.strength >= MAX_MATCH:
            return best  # no match is longer
        if texts.own is not None:
            match = texts.own.find(token_ids, key)
            if match is not None and (best is None or match.length > best.strength):
                draft = _continue(token_ids, match.place, most)
                best = Draft(draft, DraftSource.ngram, match.length)
        if self._history is not None:
            found = self._history.find(_partition(request), token_ids, key, most)
            if found is not None and (best is None or found[1] > best.strength):
                best = Draft(found[0], DraftSource.history, found[1])
        return best

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        if self._history is not None:
            prompt = request.prompt_token_ids
            self._history.learn(_partition(request), prompt, token_ids[len(prompt) :])

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def reset(self) -> None:
        if self._history is not None:
            self._history.clear()

    def _begin(self, request: Request, token_ids: Sequence[int]) -> _Texts:
        config, predicted = self._config, request.prediction_token_ids
        return _Texts(
            TextIndex(token_ids, config.min_match) if config.drafter.uses_ngram else None,
            PredictionFollower(
                predicted,
                num_prompt_tokens=len(request.prompt_token_ids),
                min_match=config.min_match,
            )
            if predicted
            else None,
        )


def _partition(request: Request) -> Hashable:
    """The partition of a request. Requests find only answers of their own partition."""
    return request.cache_salt, request.cache_keys


def _continue(token_ids: Sequence[int], place: int, most: int) -> list[int]:
    """The tokens from `place` on, repeated until there are `most`.

    In a text that repeats with a period of p tokens, `place` is p tokens before the end. So only p
    tokens follow it. Repeating them gives a longer draft.
    """
    draft = list(token_ids[place : place + most])
    period = len(draft)
    while len(draft) < most:
        draft.append(draft[len(draft) - period])
    return draft
