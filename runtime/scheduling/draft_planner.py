"""Adds the draft tokens of a drafter (runtime/speculation) to the decodes of a planned step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ostinato.runtime.costs.cost_table import Chunk, CostTable
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.kv.block_table import StatePlan
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager, NewBlocks
from ostinato.runtime.scheduling.sequences.sequence import Sequence
from ostinato.runtime.scheduling.step_plan import StepPlan
from ostinato.runtime.speculation.depth import (
    Candidate,
    DepthChooser,
    DraftRecord,
    FairStep,
    StepLoad,
)
from ostinato.runtime.speculation.proposer import (
    BatchProposer,
    Draft,
    DraftJob,
    DraftSource,
    Proposer,
)
from ostinato.runtime.types.speculation import SpeculationReport, SpeculationStats
from ostinato.runtime.types.step import ScheduledSequence

__all__ = ("DraftPlanner",)

# With measured step costs and no draft model, a step that looks for no draft is compared with its
# predicted cost only if no step since this many steps was. A prediction takes 2 % of a step of a
# small model.
_OBSERVED_STRIDE = 8


@dataclass(frozen=True, slots=True)
class _Place:
    """An entry of the step that gets drafts."""

    index: int  # index of the entry in the step
    draft: Draft
    count: int  # draft tokens that fit into the step, the block table and the slots for states
    new_blocks: NewBlocks
    state_slots: StatePlan | None


class VerifiedDraft(NamedTuple):
    """A draft that a step has verified."""

    num_drafts: int  # number of its tokens
    num_right: int  # how many of its tokens were right, counted from the first
    is_predicted: bool  # its tokens are from the request's `prediction`


class DraftPlanner:
    """Adds drafts to a planned step, within its remaining tokens and blocks.

    A draft preempts no sequence and delays no waiting sequence. Blocks with draft tokens are not
    registered in the prefix cache, because the drafts can be refused.

    Args:
        proposer: the drafter.
        cache: the KV cache manager.
        limits: the largest step, which bounds the draft tokens of a sequence and of a step.
        costs: the step-cost table, by which the number of drafts is chosen; None = all drafts are
            verified.

    Attributes:
        stats: counters since the start.
    """

    def __init__(
        self,
        proposer: Proposer,
        cache: KVCacheManager,
        limits: StepLimits,
        *,
        costs: CostTable | None = None,
    ) -> None:
        max_drafts = min(proposer.max_drafts, limits.rows_per_seq - 1)
        self.proposer = proposer
        self.stats = SpeculationStats(accepted_per_position=[0] * max_drafts)
        self._cache = cache
        self._max_drafts = max_drafts
        self._max_step_drafts = limits.max_step_drafts
        self._costs = costs
        self._model = proposer if isinstance(proposer, BatchProposer) else None
        self._depth = DepthChooser(costs, max_drafts, self.model_costs)
        # Whether the cost of looking for drafts is weighed. This needs measured step costs. With a
        # draft model it is not weighed.
        self._is_sparing = costs is not None and self._model is None
        self._num_unobserved = 0  # steps since the last one with a predicted cost

    @property
    def model_costs(self) -> CostTable | None:
        """The step costs of the draft model; None without a draft model, or if not measured."""
        return None if self._model is None else self._model.costs

    def waits_for(self, sequence: Sequence) -> bool:
        """Whether a sequence with a step in flight skips this step.

        It does if that step verifies its drafts, or so that it can get a draft. A draft needs the
        sequence's last token, which is known when the step in flight is read.
        """
        if sequence.num_drafts:  # the step in flight verifies them
            return True
        if self._depth.is_paused or not sequence.request.sampling.speculation:
            return False
        record = sequence.draft_record
        if record is None:
            record = sequence.draft_record = DraftRecord()
        if record.num_idle and not record.skip():
            return False
        if self._is_sparing and record.rests() and not sequence.forced_token_ids:
            return False
        record.is_awaited = self._guess(sequence, self._room(sequence)) is not None
        return record.is_awaited

    def add(self, step: StepPlan, num_running: int, fair: FairStep | None = None) -> None:
        """Add drafts to the decodes of a step.

        Only sequences without another step in flight get drafts: their last token is known.

        Args:
            step: a step in which everything else is planned.
            num_running: number of running sequences. One free block is left for each sequence.
            fair: limits the drafts of large requests; None = no limit.
        """
        if self._model is not None:
            for admitted in step.admitted:
                self._model.admit(admitted.row, admitted.request)
            self._follow(self._model, step)
        # Processor time: on a busy machine another program can have the processor for as long as
        # many lookups take, and drafts would pause for hundreds of steps.
        begin = time.thread_time()
        self._depth.pass_step(len(step.sequences))
        looking = [] if self._depth.is_paused and fair is None else self._looking(step)
        self._num_unobserved += 1
        repeats = step.take_repeats() if self._cache.states is not None else set[int]()
        is_rare = self._is_sparing and self._num_unobserved < _OBSERVED_STRIDE
        if is_rare and not (looking or repeats):
            return
        chunks = [
            entry
            for index, entry in enumerate(step.scheduled)
            if entry.token_ids and index not in repeats
        ]
        if len(chunks) == len(step.scheduled):
            return
        self._num_unobserved = 0
        step.load = self._load(step, chunks)._replace(has_large=fair is not None)
        if not looking:
            return
        places: list[int] = []
        candidates: list[Candidate] = []
        for index, record in looking:
            if (budget := step.budget_left) < 1:
                break
            sequence = step.sequences[index]
            is_large = fair is not None and sequence.request.group_size > fair.least
            if is_large and self._depth.is_paused:
                continue
            draft = self._guess(sequence, min(budget, self._room(sequence)))
            if draft is not None:
                places.append(index)
                candidates.append(Candidate(draft, record, is_large))
        counts = self._depth.choose(step.load, candidates, fair) if candidates else []
        step.load = step.load._replace(lookup_seconds=time.thread_time() - begin)
        taken = [
            place
            for index, candidate, count in zip(places, candidates, counts, strict=True)
            if (place := self._take(step, index, candidate.draft, count, num_running))
        ]
        for place in taken if self._model is None else self._draw(self._model, step, taken):
            self._write(step, place)

    def idle(self) -> None:
        """Note that the engine has no work."""
        if self._model is not None:
            self._model.idle()

    def close(self) -> None:
        """Free the draft model, if there is one."""
        if self._model is not None:
            self._model.close()

    def _looking(self, step: StepPlan) -> list[tuple[int, DraftRecord]]:
        """The step's entries that get a draft if one is found, and the records of their drafts."""
        found: list[tuple[int, DraftRecord]] = []
        for index, sequence in enumerate(step.sequences):
            if sequence.num_in_flight != 1 or step.scheduled[index].token_ids:
                continue
            if not sequence.request.sampling.speculation:
                continue
            record = sequence.draft_record
            if record is None:
                record = sequence.draft_record = DraftRecord()
            rests = self._is_sparing and not record.is_awaited and record.rests()
            record.is_awaited = False
            if rests and not sequence.forced_token_ids:
                continue
            found.append((index, record))
        return found

    def _load(self, step: StepPlan, chunks: list[ScheduledSequence]) -> StepLoad:
        """The work that is planned so far; `chunks` are the entries that are no decodes."""
        num_decodes = len(step.scheduled) - len(chunks)
        starts = sum(entry.start for entry in step.scheduled) - sum(e.start for e in chunks)
        context = starts / num_decodes
        if self._costs is None or not chunks:
            return StepLoad(num_decodes, context)
        sizes = [Chunk(e.num_new_tokens, e.start, e.num_prompt_logits) for e in chunks]
        both = self._costs.mixed_seconds(num_decodes, context, sizes)
        prompts = both - self._costs.decode_seconds(num_decodes, context)
        return StepLoad(num_decodes, context, max(0.0, prompts))

    def observe(self, step: StepPlan, seconds: float) -> None:
        """Learn from the seconds that a step took. Called after its result was processed."""
        if step.load is not None and not step.load.prompt_seconds:
            num_drafts = step.num_drafts + step.num_repeats
            self._depth.observe(step.load, num_drafts, step.num_accepted, seconds)
            self.stats.num_pauses = self._depth.num_pauses

    def settle(self, sequence: Sequence, num_right: int) -> VerifiedDraft | None:
        """Count the positions of refused drafts as not computed; a later step computes them.

        With recurrent layers, whose states then go back behind the first draft, the positions of
        right drafts are computed again too.

        Args:
            sequence: a sequence of the step that was read.
            num_right: how many of its drafts were right, counted from the first.

        Returns:
            None if the sequence had no drafts.
        """
        if not (num_drafts := sequence.num_drafts):
            return None
        self._take_back(sequence, num_drafts, num_right)
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += num_drafts
        draft, record = sequence.draft, sequence.draft_record
        assert draft is not None, "a sequence with drafts keeps the draft that they come from"
        assert record is not None, "a sequence with drafts has a record of them"
        self._depth.verified(Candidate(draft, record), num_drafts, num_right)
        if self._model is not None and draft.source is DraftSource.model:
            self._model.settle(sequence.row, num_right)
        return VerifiedDraft(num_drafts, num_right, draft.source is DraftSource.prediction)

    def report(
        self, step: StepPlan, verified: VerifiedDraft, num_returned: int
    ) -> SpeculationReport:
        """Count the draft tokens that are in the answer. Right drafts after its end do not count.

        Args:
            step: the step that verified the draft.
            verified: from `settle`.
            num_returned: tokens that the step adds to the answer.
        """
        num_drafts, num_right, is_predicted = verified
        num_accepted = min(num_right, num_returned)
        step.num_accepted += num_accepted
        self.stats.accept(num_accepted)
        return SpeculationReport(
            1,
            num_drafts,
            num_accepted,
            num_accepted if is_predicted else 0,
            num_drafts - num_accepted if is_predicted else 0,
        )

    def take_forced(self, step: StepPlan, forced: Mapping[int, list[int]]) -> None:
        """Store the tokens that grammars force. They are the next drafts of their sequences.

        Args:
            step: the step that was read.
            forced: `StepResult.forced_token_ids`.
        """
        place = 0
        for entry, sequence in zip(step.scheduled, step.sequences, strict=True):
            if entry.num_logits:
                if forced or sequence.forced_token_ids:  # most steps have neither
                    sequence.forced_token_ids = forced.get(place, [])
                place += 1

    @staticmethod
    def _room(sequence: Sequence) -> int:
        """How many drafts fit into the sequence, with one more token after them."""
        return sequence.max_num_tokens - sequence.num_tokens - 1

    def _guess(self, sequence: Sequence, most: int) -> Draft | None:
        """The draft of a sequence, with at least one token; None = no draft."""
        request = sequence.request
        most = min(self._max_drafts, most)
        if most < 1 or sequence.beam is not None or not request.sampling.speculation:
            return None
        if sequence.forced_token_ids:
            return Draft(sequence.forced_token_ids[:most], DraftSource.grammar)
        draft = self.proposer.propose(request, sequence.token_ids, most)
        if draft is None or not draft.token_ids:
            return None
        if self._model is not None and draft.source in (DraftSource.ngram, DraftSource.history):
            own = self._model.guess(request, sequence.token_ids, most)
            record = sequence.draft_record or DraftRecord()
            if own is not None and self._depth.is_better(
                Candidate(own, record), Candidate(draft, record), len(sequence.token_ids)
            ):
                return own
        if len(draft.token_ids) > most:
            draft = draft._replace(token_ids=draft.token_ids[:most])
        return draft

    def _take(
        self, step: StepPlan, index: int, draft: Draft, count: int, num_running: int
    ) -> _Place | None:
        """Take budget and blocks for up to `count` draft tokens; None if there is no room."""
        entry, sequence = step.scheduled[index], step.sequences[index]
        count = min(count, step.budget_left)
        if self._max_step_drafts is not None:
            count = min(count, self._max_step_drafts - step.num_drafts)
        if count < 1:
            return None
        count = step.fitting_drafts(count, entry.start + 1)
        state_slots, states, table = entry.state_slots, self._cache.states, sequence.block_table
        if states is not None:
            count = min(count, states.draft_room(table, state_slots, entry.start))
        count, new_blocks = self._take_blocks(sequence, count, num_running)
        if count < 1:
            return None
        step.take_drafts(count, entry.start + 1)
        if states is not None:
            state_slots = states.plan_drafts(table)
        return _Place(index, draft, count, new_blocks, state_slots)

    def _follow(self, model: BatchProposer, step: StepPlan) -> None:
        """Let a draft head catch up on sequences with many positions that it has not computed.

        Otherwise their hidden states would be kept until the next draft (`BatchProposer.follow`).
        """
        begin = time.perf_counter()
        model.follow(
            [
                DraftJob(entry.row, sequence.request, sequence.token_ids, sequence.block_table, 1)
                for entry, sequence in zip(step.scheduled, step.sequences, strict=True)
            ]
        )
        self.stats.drafting_seconds += time.perf_counter() - begin

    def _draw(self, model: BatchProposer, step: StepPlan, taken: list[_Place]) -> list[_Place]:
        """Let the draft model draw tokens for the places whose drafts come from it.

        Returns:
            All places. Those of the draft model now have their tokens.
        """
        jobs: list[DraftJob] = []
        for place in taken:
            if place.draft.source is DraftSource.model:
                sequence = step.sequences[place.index]
                row, table = step.scheduled[place.index].row, sequence.block_table
                jobs.append(DraftJob(row, sequence.request, sequence.token_ids, table, place.count))
        if not jobs:
            return taken
        begin = time.perf_counter()
        longest = max(len(job.token_ids) for job in jobs)
        drawn = iter(model.draw(jobs, step.chunk_limit(0, longest, 0)))
        seconds = time.perf_counter() - begin
        self.stats.drafting_seconds += seconds
        if step.load is not None and model.is_queued:
            predicted = self._depth.predicted_drafting
            step.load = step.load._replace(drafting_seconds=predicted, has_queued_drafts=True)
        elif step.load is not None:
            step.load = step.load._replace(drafting_seconds=seconds)
        places: list[_Place] = []
        for place in taken:
            if place.draft.source is DraftSource.model:
                draft = place.draft._replace(token_ids=next(drawn))
                count = len(draft.token_ids)
                step.return_drafts(place.count - count)
                place = replace(place, draft=draft, count=count)
            places.append(place)
        return places

    def _write(self, step: StepPlan, place: _Place) -> None:
        """Put the draft tokens and blocks of a place into the step's entry."""
        entry, sequence = step.scheduled[place.index], step.sequences[place.index]
        count, (block_ids, window_block_ids) = place.count, place.new_blocks
        token_ids: list[int] = []  # without drafts: the runner has the row's last token
        if count:
            token_ids = [sequence.token_ids[-1], *place.draft.token_ids[:count]]
            sequence.num_computed_tokens += count
            sequence.num_drafts, sequence.draft = count, place.draft
        else:  # the drafter proposed none
            self._settle_states(sequence, 0, are_right=False)
        step.scheduled[place.index] = ScheduledSequence(
            entry.row,
            entry.start,
            1 + count,
            token_ids,
            [*entry.new_block_ids, *block_ids],
            1 + count,
            new_window_block_ids=[*entry.new_window_block_ids, *window_block_ids],
            state_slots=place.state_slots if count else entry.state_slots,
        )

    def _take_back(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Let a later step compute the positions of refused drafts; with states, of all drafts."""
        sequence.num_drafts = 0
        are_right = num_right == num_drafts
        if self._cache.states is not None:
            self._settle_states(sequence, sequence.num_computed_tokens, are_right=are_right)
            if num_right and not are_right:
                # These tokens are known, so they are computed as a chunk.
                sequence.num_prefill_tokens = sequence.num_tokens + num_right + 1
                sequence.num_repeats, num_right = num_right, 0
        sequence.num_computed_tokens -= num_drafts - num_right

    def _settle_states(self, sequence: Sequence, end: int, *, are_right: bool) -> None:
        """See `StateSlots.settle_drafts`; not for a sequence without states of drafts."""
        states, table = self._cache.states, sequence.block_table
        if states is not None and table.states is not None and table.states.draft_slot:
            states.settle_drafts(table, end, are_right=are_right)

    def _take_blocks(
        self, sequence: Sequence, count: int, num_running: int
    ) -> tuple[int, NewBlocks]:
        """How many of `count` drafts have room in the table, and the new blocks for them."""
        cache, table = self._cache, sequence.block_table
        needed = sequence.num_computed_tokens + count
        missing = cache.num_missing(table, needed)
        if not missing:
            return count, NewBlocks([])
        if missing + num_running <= cache.num_free_blocks:
            new_blocks = cache.allocate(table, needed, sequence.num_computed_tokens - 1)
            assert new_blocks is not None, "blocks that were counted free cannot be allocated"
            return count, new_blocks
        return cache.num_tokens(table) - sequence.num_computed_tokens, NewBlocks([])
