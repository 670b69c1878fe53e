"""Chooses how many draft tokens a step verifies, from measured costs and acceptance.

The choice maximises the tokens that a step is expected to give per second. A step has S decoding
sequences. For each draft token, take the probability that it and all tokens before it in its draft
are right. Let s_1 >= s_2 >= ... be these probabilities for the tokens of all drafts. The step gets
the first B of these tokens, where B maximises

    (S + s_1 + ... + s_B) / seconds(S, B)

B is 0 if drafts do not pay. With a draft model the seconds of drafting are added. The model draws
in rounds. A round draws one token for every sequence that still needs one. The seconds come from
the step-cost tables, and are corrected by the observed steps. If steps with drafts are slower than
steps without, drafts pause.

A request of many sequences with good drafts could make the steps of other requests many times as
long. So beside smaller requests, drafts of a large request get the time that `FairStep` leaves. And
its sequences do not count in S when drafts of the smaller requests are chosen. Else these would get
none, because they are few of many tokens. For the same reason such steps neither cause a pause nor
heed one, except for the drafts of the large request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.speculation.acceptance import AcceptanceRates, OwnRate
from ostinato.runtime.speculation.proposer import Draft, DraftSource

__all__ = ("Candidate", "DepthChooser", "DraftRecord", "FairStep", "StepLoad")

# After this many steps of a sequence without drafts, one draft token is tried. The number begins
# with the first value and doubles after each wrong draft, up to the last value.
_FIRST_PROBE, _LAST_PROBE = 8, 256
# After _QUIET steps without a right draft, only every _STRIDE-th step looks for a draft.
_QUIET, _STRIDE = 8, 8
_CONTEXT_STEP, _MOST_DECODES = 32, 4096
_CORRECTION = 0.05  # weight of the newest step in the corrections of the costs
_MOST_SLOWER = 2.0  # an observed step counts as at most this many times as long as predicted
_WINDOW = 64  # steps with drafts after which their gain is checked
# The length of a pause in steps, after a check that found a loss. Each further loss doubles it.
_PAUSE, _LONGEST_PAUSE = 256, 1024


class DraftRecord:
    """How often the drafts of one sequence were right, and when the next draft is tried."""

    __slots__ = ("is_awaited", "num_idle", "num_quiet", "own", "wait")

    def __init__(self) -> None:
        self.own = OwnRate()
        self.is_awaited = False  # the sequence has left out a step to get a draft
        self.num_idle = 0  # steps since its last draft
        self.num_quiet = 0  # steps since a draft was right
        self.wait = _FIRST_PROBE  # steps without drafts before one token is tried

    def rests(self) -> bool:
        """Count a step; returns whether the step does not look for a draft.

        Looking for a draft takes time: about 20 microseconds if there are many matches.
        """
        self.num_quiet += 1
        return self.num_quiet > _QUIET and self.num_quiet % _STRIDE != 0

    def skip(self) -> bool:
        """Count a step without drafts; returns whether it should try one draft token instead."""
        self.num_idle += 1
        return self.num_idle >= self.wait

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verified draft."""
        self.own.add(min(num_accepted + 1, num_drafts), num_accepted)
        is_wrong = not num_accepted
        self.num_quiet = self.num_quiet if is_wrong else 0
        self.wait = min(_LAST_PROBE, 2 * self.wait) if is_wrong else _FIRST_PROBE


class StepLoad(NamedTuple):
    """The work of a step before drafts are added."""

    num_decodes: int
    context: float  # mean number of cached tokens of the decodes
    prompt_seconds: float = 0.0  # predicted seconds of the prompts in the step
    # Time that a draft model took before the step. If its work was queued on a GPU, the predicted
    # time of this work, which the step's own time includes.
    drafting_seconds: float = 0.0
    has_queued_drafts: bool = False
    # Processor time of looking for drafts and of choosing their number.
    lookup_seconds: float = 0.0
    has_large: bool = False  # a `FairStep` limits some requests


class Candidate(NamedTuple):
    """The draft of one sequence, and the record of its earlier drafts."""

    draft: Draft
    record: DraftRecord
    is_large: bool = False  # its request is limited by the step's `FairStep`


class FairStep(NamedTuple):
    """A step in which no request has more sequences than the smallest request.

    Drafts of larger requests may make a step `max_slowdown` times as long as this step with the
    drafts of the other requests.
    """

    num_decodes: int
    least: int  # sequences of the smallest request
    max_slowdown: float


class _Surcharges(dict[int, float]):
    """Number of draft tokens -> the seconds that they add to a step. Computed when first asked for.

    Args:
        costs: the step costs.
        num_decodes: sequences of the step.
    """

    def __init__(self, costs: CostTable, num_decodes: int) -> None:
        super().__init__({0: 0.0})
        self._costs = costs
        self._num_decodes = num_decodes

    def __missing__(self, num_drafts: int) -> float:
        seconds = self[num_drafts] = self._costs.verify_surcharge(self._num_decodes, num_drafts)
        return seconds


class DepthChooser:
    """Chooses the draft tokens of each step.

    Args:
        costs: the step-cost table. None = not measured; then all drafts are verified.
        max_drafts: draft tokens of one sequence in one step, at most.
        model_costs: the step costs of the draft model; None = drafts take no time.

    Attributes:
        num_pauses: how often drafts paused because steps with drafts were slower.
    """

    def __init__(
        self,
        costs: CostTable | None,
        max_drafts: int,
        model_costs: CostTable | None = None,
    ) -> None:
        self.num_pauses = 0
        self._model_costs = model_costs
        self._costs = costs
        self._rates = AcceptanceRates(max_drafts)
        # Number of decodes -> results of `_surcharges_of`.
        self._surcharges: dict[int, _Surcharges] = {}
        # (number of decodes, context in units of _CONTEXT_STEP tokens) -> predicted seconds.
        self._decodes: dict[tuple[int, int], float] = {}
        self._max_drafts = max_drafts
        self._num_paused = 0  # steps until the end of the pause
        self._num_at_pause = 0  # decodes when the pause began
        self._next_pause = _PAUSE
        # Predicted seconds of drafting for the last choice, divided by `_plain`.
        self._predicted_drafting = 0.0
        self._plain = 1.0  # observed / predicted seconds of steps without drafts
        self._drafted = 1.0  # a further factor for the seconds of steps with drafts
        self._drafting = 1.0  # observed / predicted seconds of drafting
        self._num_steps = 0  # steps with drafts since the last check of their gain
        # Time of these steps, plus the time of looking for drafts in all steps since that check.
        self._seconds = 0.0
        self._plain_seconds = 0.0  # predicted seconds for the same tokens without drafts

    def choose(
        self, load: StepLoad, candidates: Sequence[Candidate], fair: FairStep | None = None
    ) -> list[int]:
        """How many draft tokens of each candidate the step verifies.

        Args:
            load: the step, with at least one decode.
            candidates: sequences of the step with their drafts.
            fair: limits the drafts of candidates with `is_large`; None = no limit.
        """
        if self._costs is None:
            return [len(one.draft.token_ids) for one in candidates]
        if self._num_paused and fair is None:
            return [0] * len(candidates)
        chances = [self._rates.survival(one.draft, one.record.own) for one in candidates]
        counts = [0] * len(candidates)
        small = [i for i, one in enumerate(candidates) if fair is None or not one.is_large]
        num_decodes = load.num_decodes if fair is None else fair.num_decodes
        drafting = self._add_best(counts, small, load, candidates, chances, num_decodes)
        if fair is not None and len(small) < len(candidates) and not self._num_paused:
            seconds = self._costs.decode_seconds(fair.num_decodes, load.context)
            if num_drafts := sum(counts):
                seconds += self._costs.verify_surcharge(fair.num_decodes, num_drafts)
                seconds = seconds * self._drafted + drafting
            large = [i for i, one in enumerate(candidates) if one.is_large]
            limit = fair.max_slowdown * seconds
            drafting = self._add_best(
                counts, large, load, candidates, chances, load.num_decodes, limit
            )
        self._predicted_drafting = drafting
        for index, one in enumerate(candidates):
            is_limited = fair is not None and one.is_large
            if counts[index] or (not is_limited and one.record.skip()):
                counts[index] = counts[index] or 1
                one.record.num_idle = 0
        return counts

    def _add_best(
        self,
        counts: list[int],
        indices: Sequence[int],
        load: StepLoad,
        candidates: Sequence[Candidate],
        chances: Sequence[Sequence[float]],
        num_decodes: int,
        limit: float = math.inf,
    ) -> float:
        """Add the draft tokens of some candidates with which the step gives most tokens a second.

        Args:
            counts: the draft tokens of each candidate so far; changed.
            indices: the candidates whose tokens are added. Their counts are 0.
            load: the step.
            candidates: all candidates.
            chances: for each candidate the probabilities that its tokens are right.
            num_decodes: the tokens without drafts that count.
            limit: the step may take this many seconds with the added tokens, uncorrected by
                `_plain`.

        Returns:
            The predicted seconds of drafting, divided by `_plain`.
        """
        tokens = [(chance, -p, i) for i in indices for p, chance in enumerate(chances[i])]
        if len(indices) > 1:  # those of one draft fall from place to place
            tokens.sort(reverse=True)  # equal chances: the earlier places first
        expected, num_before = float(num_decodes), sum(counts)
        plain, surcharges = self._plain_prediction(load), self._surcharges_of(load.num_decodes)
        rounds = self._round_costs(load, candidates)
        in_round = [0] * self._max_drafts  # for each round of drafting, its number of sequences
        for one, count, its_chances in zip(candidates, counts, chances, strict=True):
            expected += sum(its_chances[:count])
            if rounds and one.draft.source is DraftSource.model:
                for place in range(count):
                    in_round[place] += 1
        drafting = sum(rounds[number] for number in in_round) if rounds else 0.0
        seconds = plain
        if num_before:
            seconds = (plain + surcharges[num_before]) * self._drafted + drafting
        best, best_rate, best_drafting = 0, expected / seconds, drafting
        for count, (chance, place, index) in enumerate(tokens, 1):
            expected += chance
            if rounds and candidates[index].draft.source is DraftSource.model:
                in_round[-place] += 1
                drafting += rounds[in_round[-place]] - rounds[in_round[-place] - 1]
            seconds = (plain + surcharges[num_before + count]) * self._drafted + drafting
            if seconds > limit:
                break
            if (rate := expected / seconds) > best_rate:
                best, best_rate, best_drafting = count, rate, drafting
        for _, _, index in tokens[:best]:
            counts[index] += 1
        return best_drafting

    def is_better(self, model: Candidate, text: Candidate, context: float) -> bool:
        """Whether the model's draft is expected to give more tokens a second than the text draft.

        Args:
            model: a draft whose tokens the draft model has not drawn yet.
            text: a draft from text.
            context: number of tokens of the sequence.
        """
        if self._costs is None or self._model_costs is None:
            return False
        load = StepLoad(1, context)
        plain, surcharges = self._plain_prediction(load), self._surcharges_of(1)
        rounds = self._round_costs(load, [model])
        best: list[float] = []
        for one, drawn_s in ((model, rounds[1]), (text, 0.0)):
            expected, rates = 1.0, [0.0]
            for count, chance in enumerate(self._rates.survival(one.draft, one.record.own), 1):
                expected += chance
                seconds = (plain + surcharges[count]) * self._drafted + count * drawn_s
                rates.append(expected / seconds)
            best.append(max(rates))
        return best[0] > best[1]

    def _round_costs(self, load: StepLoad, candidates: Sequence[Candidate]) -> list[float]:
        """Seconds of one round of drafting; the index is its number of sequences.

        The list is empty without a draft model. The seconds are divided by the correction of steps
        without drafts (`_plain`), because the prediction of the step is not corrected either.
        """
        if self._model_costs is None:
            return []
        scale = self._drafting / self._plain
        costs = [
            self._model_costs.decode_seconds(count, load.context) * scale
            for count in range(1, len(candidates) + 1)
        ]
        return [0.0, *costs]

    def pass_step(self, num_seqs: int) -> None:
        """Count a step of `num_seqs` sequences. A pause lasts for a number of steps.

        It ends with the first step of half as many sequences. Drafts pay more in such steps.
        """
        self._num_paused = max(0, self._num_paused - 1)
        if 2 * num_seqs <= self._num_at_pause:
            self._num_paused = 0

    @property
    def is_paused(self) -> bool:
        """Whether drafts pause, because steps with them were slower."""
        return self._num_paused > 0

    @property
    def predicted_drafting(self) -> float:
        """Predicted seconds of drafting for the last choice."""
        return self._predicted_drafting * self._plain

    def seconds(self, load: StepLoad, num_drafts: int) -> float:
        """Predicted seconds of the step with `num_drafts` draft tokens, with the corrections."""
        plain = self._plain_prediction(load)
        if not num_drafts:
            return plain * self._plain
        surcharge = self._surcharges_of(load.num_decodes)[num_drafts]
        return (plain + surcharge) * self._plain * self._drafted

    def _plain_prediction(self, load: StepLoad) -> float:
        assert self._costs is not None, "the step costs are measured"
        key = load.num_decodes, int(load.context) // _CONTEXT_STEP
        decode = self._decodes.get(key)
        if decode is None:
            if len(self._decodes) == _MOST_DECODES:
                self._decodes.clear()
            decode = self._costs.decode_seconds(key[0], key[1] * _CONTEXT_STEP)
            self._decodes[key] = decode
        return max(decode + load.prompt_seconds, 1e-9)

    def _surcharges_of(self, num_decodes: int) -> _Surcharges:
        surcharges = self._surcharges.get(num_decodes)
        if surcharges is None:
            assert self._costs is not None, "the step costs are measured"
            surcharges = self._surcharges[num_decodes] = _Surcharges(self._costs, num_decodes)
        return surcharges

    def verified(self, candidate: Candidate, num_drafts: int, num_accepted: int) -> None:
        """Learn from a verified draft of `num_drafts` tokens."""
        self._rates.add(candidate.draft, num_drafts, num_accepted)
        candidate.record.add(num_drafts, num_accepted)

    def observe(self, load: StepLoad, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Learn from the seconds that a step took.

        Args:
            load: the step.
            num_drafts: the draft tokens of the step.
            num_accepted: how many draft tokens were right.
            seconds: from the step's launch until its tokens were read. This includes the drafting
                only if it was queued on a GPU.
        """
        if self._costs is None:
            return
        if not load.has_large:
            self._seconds += load.lookup_seconds  # steps that got no drafts take this time too
        if load.has_queued_drafts:
            seconds = max(0.0, seconds - load.drafting_seconds)
        elif load.drafting_seconds and self._predicted_drafting:
            ratio = load.drafting_seconds / self.predicted_drafting
            self._drafting *= min(2.0, max(0.5, ratio)) ** _CORRECTION
        predicted = self.seconds(load, num_drafts)
        # A single slow step says little about the next ones. Another program may have had the
        # processor meanwhile.
        seconds = min(seconds, _MOST_SLOWER * predicted)
        ratio = max(1 / _MOST_SLOWER, seconds / predicted) ** _CORRECTION
        if not num_drafts:
            self._plain *= ratio
            return
        self._drafted *= ratio
        if load.has_large:
            return
        self._num_steps += 1
        self._seconds += seconds + load.drafting_seconds
        num_tokens = load.num_decodes + num_accepted
        self._plain_seconds += self.seconds(load, 0) * num_tokens / load.num_decodes
        if self._num_steps == _WINDOW:
            if self._seconds > self._plain_seconds:
                self._num_paused, self._num_at_pause = self._next_pause, load.num_decodes
                self._next_pause = min(_LONGEST_PAUSE, 2 * self._next_pause)
                self.num_pauses += 1
            else:
                self._next_pause = _PAUSE
            self._num_steps, self._seconds, self._plain_seconds = 0, 0.0, 0.0
