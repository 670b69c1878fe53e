"""Acceptance rates of draft tokens: by drafter, match length and position, and by sequence.

The rates follow the traffic: after 256 more verified drafts a count has half of its weight.
"""

from __future__ import annotations

from ostinato.runtime.speculation.proposer import Draft, DraftSource

__all__ = ("AcceptanceRates", "OwnRate", "strength_class")

_HALF_LIFE = 256  # in verified drafts of one source and strength
_OWN_HALF_LIFE = 32  # in verified draft tokens of one sequence
_PRIOR_WEIGHT = 4.0  # the assumed initial rate counts like this many draft tokens
_OWN_PRIOR_WEIGHT = 4.0  # in a sequence's own rate, the common rate counts like this many tokens
_CLASSES = (2, 3, 4, 6, 8, 16, 32)  # match lengths; other lengths are rounded down to one of these
# The class of each match length up to the last class. Every step looks one up.
_CLASS_OF = [
    max((one for one in _CLASSES if one <= length), default=0) for length in range(_CLASSES[-1] + 1)
]
_KEEP = 0.5 ** (1 / _HALF_LIFE)
_PRIORS = {DraftSource.grammar: 0.9, DraftSource.prediction: 0.8}  # assumed initial rates
_PRIOR = 0.4  # the initial rate of the other sources


def strength_class(strength: int) -> int:
    """The class of a match length. Drafts of one class are expected to be right equally often."""
    return _CLASS_OF[min(strength, _CLASSES[-1])]


class OwnRate:
    """How often the drafts of one sequence were right."""

    __slots__ = ("num_right", "num_tried")

    def __init__(self) -> None:
        self.num_right = 0.0
        self.num_tried = 0.0

    def add(self, num_tried: int, num_right: int) -> None:
        """Count draft tokens that were compared, and how many of them were right."""
        keep = 0.5 ** (num_tried / _OWN_HALF_LIFE)
        self.num_tried = self.num_tried * keep + num_tried
        self.num_right = self.num_right * keep + num_right

    def blend(self, common: float) -> float:
        """The sequence's rate. It is near `common` while few of its drafts are verified."""
        return (self.num_right + _OWN_PRIOR_WEIGHT * common) / (self.num_tried + _OWN_PRIOR_WEIGHT)


class AcceptanceRates:
    """The rates over all sequences of an engine.

    Args:
        max_drafts: draft tokens of one sequence in one step, at most.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._counts: dict[tuple[DraftSource, int], tuple[list[float], list[float]]] = {}

    def add(self, draft: Draft, num_drafts: int, num_accepted: int) -> None:
        """Count a verified draft of `num_drafts` tokens, the first `num_accepted` of them right."""
        tried, right = self._of(draft)
        for place in range(self._max_drafts):
            tried[place] *= _KEEP
            right[place] *= _KEEP
        for place in range(min(num_accepted + 1, num_drafts)):
            tried[place] += 1.0
            right[place] += place < num_accepted

    def survival(self, draft: Draft, own: OwnRate) -> list[float]:
        """For each draft token: the probability that it and all before it are right."""
        tried, right = self._of(draft)
        prior = _PRIORS.get(draft.source, _PRIOR)
        chances: list[float] = []
        chance = 1.0
        for place in range(len(draft.token_ids)):
            common = (right[place] + _PRIOR_WEIGHT * prior) / (tried[place] + _PRIOR_WEIGHT)
            # The next place is verified less often. At first, it is assumed to have this rate.
            prior = common
            chance *= own.blend(common)
            chances.append(chance)
        return chances

    def _of(self, draft: Draft) -> tuple[list[float], list[float]]:
        key = draft.source, strength_class(draft.strength)
        counts = self._counts.get(key)
        if counts is None:
            size = self._max_drafts
            counts = self._counts[key] = [0.0] * size, [0.0] * size
        return counts
