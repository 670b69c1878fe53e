"""The common part of drafters with a model, which also get drafts from text.

A predicted output goes before the model's drafts. If there is another draft from text, the planner
compares it with the model's draft. It takes the one that is expected to give more tokens a second.

A step is planned before the model draws its drafts. So the planner gets a draft of placeholders.
The model's tokens replace the placeholders when they have been drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ostinato.runtime.speculation.proposer import Draft, DraftSource, Proposer
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

__all__ = ("GuessingDrafter", "draft_request")


class GuessingDrafter(ABC):
    """The part of a `BatchProposer` that does not depend on its model.

    Args:
        max_drafts: draft tokens of one sequence in one step, at most.
        texts: a drafter whose drafts from text go first, such as `TextDrafter`.
        is_queued: steps of the model are only queued, and its tokens stay on the device.
    """

    def __init__(self, max_drafts: int, texts: Proposer, *, is_queued: bool = False) -> None:
        self.is_queued = is_queued
        self._max_drafts = max_drafts
        self._texts = texts
        self._placeholders = [0] * max_drafts

    @property
    def max_drafts(self) -> int:
        return self._max_drafts

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        draft = self._texts.propose(request, token_ids, most)
        return self.guess(request, token_ids, most) if draft is None else draft

    def guess(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        most = min(most, self._room(request, len(token_ids)))
        return Draft(self._placeholders[:most], DraftSource.model) if most > 0 else None

    @abstractmethod
    def _room(self, request: Request, num_tokens: int) -> int:
        """The number of drafts after `num_tokens` tokens that the model has positions for."""

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        self._texts.learn(request, token_ids)

    def forget(self, request_id: str) -> None:
        self._texts.forget(request_id)

    def reset(self) -> None:
        self._texts.reset()


def draft_request(request: Request) -> Request:
    """The request for the draft model's sampler.

    Penalties and other parameters that depend on earlier tokens are left out. With them, the
    sampler would have to undo the tokens of refused drafts.
    """
    sampling = request.sampling
    return Request(
        request_id=request.request_id,
        prompt_token_ids=[],
        cache_salt=request.cache_salt,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            logit_bias=sampling.logit_bias,
        ),
    )
