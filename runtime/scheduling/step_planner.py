"""Plans one step: spends its tokens on running sequences, then on waiting ones, then on drafts.

Running sequences are planned in the policy's order. A waiting sequence that precedes some running
sequences in that order is planned before these, and can take their rows and blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Set
from typing import TypeVar

from ostinato.runtime.costs.cost_table import Chunk
from ostinato.runtime.costs.token_rate import TokenRate
from ostinato.runtime.kv.block_table import StatePlan
from ostinato.runtime.kv.kv_cache_manager import NewBlocks
from ostinato.runtime.kv.state_slots import StateSlots
from ostinato.runtime.scheduling.decode_shares import DecodeShares
from ostinato.runtime.scheduling.draft_planner import DraftPlanner
from ostinato.runtime.scheduling.itl_bound import ItlBound
from ostinato.runtime.scheduling.loads import BlockLoads
from ostinato.runtime.scheduling.queues import SequenceQueues, by_order
from ostinato.runtime.scheduling.sequence_admission import SequenceAdmission
from ostinato.runtime.scheduling.sequences.sequence import Sequence, SequenceStatus
from ostinato.runtime.scheduling.step_plan import StepPlan
from ostinato.runtime.types.step import AdmittedSequence, ScheduledSequence

__all__ = ("StepPlanner",)

_RUNNING = SequenceStatus.running
# A step with decodes admits at most this many sequences that are not the first of their HTTP
# request. Setting up a row takes up to a millisecond, or 3 ms with `allowed_token_ids` of a large
# vocabulary, and the decodes wait for it.
_MOST_FURTHER = 16
_NO_BLOCKS = NewBlocks([], [])
T = TypeVar("T")


class StepPlanner:
    """Decides what each step of a scheduler computes, and takes the rows and blocks for it.

    Args:
        queues: the sequences by status.
        loads: the loads of blocks from a slower tier.
        max_num_tokens: the token budget of one step.
        bound: limits the prompt tokens of steps with decodes; None = no limit.
        drafts: adds draft tokens to decodes; None = no drafts.
        whole_prompts: compute each prompt in one step.
        score_tokens: the cost of the log-probability of one prompt token, in tokens of the budget.
            The prompt token itself costs one more.
        rate: lowers the budget of steps with whole prompts to what fits into a target time; None =
            the budget is not lowered.
        num_lanes: number of steps that run at the same time. If it is above 1, these steps (lanes)
            decode different sequences, and a sequence is decoded again only when its last token
            has arrived. 1 = the next step may be planned to decode a sequence while the step in
            flight still samples the previous token of the sequence.
        whole_images: a step has all tokens of an image or none.
        shares: leaves some decodes of large requests out of a step; None = no decode is left out.

    Attributes:
        num_prompt_tokens: prompt tokens planned so far: without prefix hits, with recomputed
            tokens.
    """

    def __init__(  # noqa: PLR0913 - the limits of a step
        self,
        queues: SequenceQueues,
        loads: BlockLoads,
        *,
        max_num_tokens: int,
        bound: ItlBound | None,
        drafts: DraftPlanner | None,
        whole_prompts: bool,
        score_tokens: float,
        rate: TokenRate | None,
        num_lanes: int,
        shares: DecodeShares | None,
        whole_images: bool,
    ) -> None:
        self.num_prompt_tokens = 0
        self._queues = queues
        self._cache = queues.cache
        self._loads = loads
        self._max_num_tokens = max_num_tokens
        self._bound = bound
        self._drafts = drafts
        self._score_tokens = score_tokens
        self._rate = rate
        self._num_lanes = num_lanes
        self._whole_images = whole_images
        # A lane has only a part of the decodes. If `_shares` left out all of this part, the step
        # would be empty.
        self._shares = shares if num_lanes == 1 else None
        self._resting: Set[Sequence] = frozenset()  # decodes that `_shares` leaves out of the step
        self._admission = SequenceAdmission(queues, loads, whole_prompts=whole_prompts)

    def plan(self) -> StepPlan:
        """Plan the next step and count its tokens as computed."""
        queues = self._queues
        self._cache.begin_step()
        decoding = queues.running
        if self._shares is not None:
            self._resting = self._shares.resting(decoding)
            if self._resting:
                decoding = [one for one in decoding if one not in self._resting]
        allowance = None if self._bound is None else self._bound.open(decoding)
        budget = self._max_num_tokens
        if self._rate is not None:
            budget = min(budget, self._rate.max_num_tokens)
        step = StepPlan(
            budget,
            allowance,
            self._score_tokens,
            self._max_decodes(),
            whole_images=self._whole_images,
        )
        self._grow_running(step)
        while self._admit_waiting(step):
            self._grow_running(step)
        if self._drafts is not None:
            fair = None if self._shares is None else self._shares.fair
            self._drafts.add(step, len(queues.running), fair)
        return step

    def _max_decodes(self) -> int | None:
        """The decodes of one lane: an equal part of all decoding sequences; None without lanes.

        So each stage of a pipeline has a step to compute. A sequence waits at most for the steps of
        the other lanes.
        """
        if self._num_lanes == 1:
            return None
        decoding = sum(
            sequence.num_computed_tokens >= sequence.num_prefill_tokens
            for sequence in self._queues.running
        )
        return -(-decoding // self._num_lanes)

    def _grow_running(self, step: StepPlan) -> None:
        """Plan the next tokens of the running sequences that come before the first waiting one.

        If no waiting sequence can be admitted in this step, all running sequences are planned.
        """
        running, waiting = self._queues.running, self._queues.waiting
        begin, end = step.num_grown, len(running)
        if begin < end and waiting and not step.is_closed and waiting[0].order < running[-1].order:
            end = bisect_left(running, waiting[0].order, lo=begin, key=by_order)
        block_size, drafts, resting = self._cache.block_size, self._drafts, self._resting
        has_windows, has_states = self._cache.has_windows, self._cache.states is not None
        scheduled, sequences, has_lanes = step.scheduled, step.sequences, self._num_lanes > 1
        for index, sequence in enumerate(running[begin:end], begin):
            if sequence.status is not _RUNNING:
                break  # this sequence and all after it were preempted
            if resting and sequence in resting:
                continue
            start = sequence.num_computed_tokens
            if sequence.is_held and sequence.num_in_flight:
                continue  # the step in flight was planned as if the step before gave a token
            if start < sequence.num_prefill_tokens:
                num_left = sequence.num_prefill_tokens - start
                limit = step.limit_of(sequence, start, num_left, len(running) - index - 1)
                self._grow_prefill(sequence, 1 if sequence.is_decoding else limit, step)
                continue
            # The search has not chosen the next token of a beam yet, or a step in flight samples
            # the final token of the sequence.
            if sequence.beam is not None or start + 1 >= sequence.max_num_tokens:
                continue
            if has_lanes and (sequence.num_in_flight or not step.decodes_left):
                continue  # the sequence is in another lane, or this lane is full
            if drafts is not None and sequence.num_in_flight and drafts.waits_for(sequence):
                continue  # its draft needs the token that the step in flight samples
            if has_states:
                entry = self._decode_with_states(sequence, step)
                if entry is None:
                    continue
            # After a prompt, the blocks of its last chunk that lie outside of the window are freed.
            elif not start % block_size or (has_windows and start == sequence.num_prefill_tokens):
                new_blocks = self._take_room(sequence, step, self._next_block)
                if new_blocks is None:
                    continue
                ids, window_ids = new_blocks
                entry = ScheduledSequence(
                    sequence.row, start, 1, [], ids, 1, 0, False, False, window_ids
                )
            else:
                entry = ScheduledSequence(sequence.row, start, 1, [], [], 1)
            sequence.num_computed_tokens = start + 1
            sequence.num_in_flight += 1
            step.num_samples += 1
            step.num_tokens_left -= 1
            if step.decodes_left is not None:
                step.decodes_left -= 1
            scheduled.append(entry)
            sequences.append(sequence)
        step.num_grown = min(end, len(running))

    def _decode_with_states(self, sequence: Sequence, step: StepPlan) -> ScheduledSequence | None:
        """The entry of a decode of a model with recurrent layers; None if there is no room."""
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + 1
        size, states = self._cache.block_size, sequence.block_table.states
        # Most decodes write their states in place. A decode that fills a unit makes a checkpoint.
        state_slots = None if states is None else states.in_place
        is_planned = state_slots is not None and end % size
        if not (is_planned or self._take_slot(sequence, step)):
            return None
        new_blocks = _NO_BLOCKS
        if not start % size or (self._cache.has_windows and start == sequence.num_prefill_tokens):
            taken = self._take_room(sequence, step, self._next_block)
            if taken is None:
                return None
            new_blocks = taken
        if not is_planned:
            state_slots = self._state_slots(sequence, end)
        ids, window_ids = new_blocks
        return ScheduledSequence(
            sequence.row, start, 1, [], ids, 1, 0, False, False, window_ids, state_slots
        )

    def _grow_prefill(self, sequence: Sequence, limit: int, step: StepPlan) -> None:
        """Plan the next `limit` known tokens of a running sequence."""
        if limit < 1:
            return
        new_blocks = _NO_BLOCKS
        start = sequence.num_computed_tokens
        if self._cache.states is not None and not self._take_slot(sequence, step):
            return
        if self._cache.has_windows:
            # Groups without a window got blocks for all known tokens at the admission.
            taken = self._take_room(sequence, step, lambda one: self._blocks_to(one, start + limit))
            if taken is None:
                return
            new_blocks = taken
        if (beam := sequence.beam) is not None:
            copies = self._take_room(sequence, step, self._writable_block)
            if copies is None:
                return
            step.block_copies += copies
            if beam.is_moved:
                # The row has the tokens and block table of another beam, so it is set up again.
                beam.is_moved = False
                new_blocks = _all_blocks(sequence)
                self._announce(sequence, step)
        if not sequence.is_decoding:
            self._take_chunk(sequence, limit, step)
        self._plan_chunk(sequence, limit, new_blocks, step)

    def _next_block(self, sequence: Sequence) -> NewBlocks | None:
        return self._blocks_to(sequence, sequence.num_computed_tokens + 1)

    def _blocks_to(self, sequence: Sequence, end: int) -> NewBlocks | None:
        """Blocks for the positions up to `end`, without those outside of the windows."""
        start = sequence.num_computed_tokens
        return self._cache.allocate(sequence.block_table, end, start)

    def _writable_block(self, sequence: Sequence) -> list[tuple[int, int]] | None:
        return self._cache.make_writable(sequence.block_table, sequence.num_computed_tokens)

    def _take_slot(self, sequence: Sequence, step: StepPlan) -> bool:
        """Make sure that a slot is free for the states that the sequence's next tokens give.

        Returns:
            False if the sequence has to wait or was preempted.
        """
        states = self._cache.states
        assert states is not None, "there are recurrent layers"

        if states.has_room(sequence.block_table):
            return True

        def has_room(one: Sequence) -> bool | None:
            return states.has_room(one.block_table) or None

        return self._take_room(sequence, step, has_room, states) or False

    def _state_slots(self, sequence: Sequence, end: int) -> StatePlan | None:
        """The slots for the sequence's next tokens, up to `end`; None without recurrent layers."""
        states = self._cache.states
        if states is None:
            return None
        start = sequence.num_computed_tokens
        return states.plan(sequence.block_table, sequence.token_ids, start, end)

    def _take_room(
        self,
        sequence: Sequence,
        step: StepPlan,
        take: Callable[[Sequence], T | None],
        states: StateSlots | None = None,
    ) -> T | None:
        """The result of `take` for a running sequence; None if it has to wait or was preempted.

        While `take` finds no room, the sequences behind this one are preempted, the last first.
        But if room will become free when a step in flight or a load ends, no further sequence is
        preempted, and every sequence that needs room skips the step. The room is blocks or, if
        `states` is given, a slot; some slots become free when the next step is planned.
        """
        queues = self._queues
        while not step.is_stalled:
            taken = take(sequence)
            if taken is not None:
                return taken
            coming = self._loads.num_blocks if states is None else states.num_leaving
            if queues.num_draining_blocks() or coming:
                step.is_stalled = step.is_closed = True
            elif queues.preempt_last() is sequence:
                break
        return None

    def _admit_waiting(self, step: StepPlan) -> bool:
        """Start waiting sequences while rows, tokens and blocks last.

        Returns:
            Whether running sequences are left to plan. If the step is not closed, these are the
            ones before the next waiting sequence. If it is closed, they are all the rest.
        """
        running, waiting = self._queues.running, self._queues.waiting
        has_decodes = step.num_samples > 0
        if waiting and not step.is_closed:
            step.is_closed = not step.takes_prompts
        while waiting and not step.is_closed:
            if step.num_grown < len(running) and running[step.num_grown].order < waiting[0].order:
                return True
            started = self._admission.start_next(step)
            if started is None:
                continue
            sequence, limit = started
            if sequence.beam is not None:
                sequence.beam.is_moved = False
            self._announce(sequence, step)
            self._take_chunk(sequence, limit, step)
            self._plan_chunk(sequence, limit, _all_blocks(sequence), step)
            step.num_further += sequence.request.place > 0
            is_full = has_decodes and step.num_further >= _MOST_FURTHER
            step.is_closed = is_full or not step.takes_prompts
        return step.num_grown < len(running)

    @staticmethod
    def _take_chunk(sequence: Sequence, num_tokens: int, step: StepPlan) -> None:
        start = sequence.num_computed_tokens
        num_scored = sequence.num_prompt_logits(start, start + num_tokens)
        step.take_chunk(Chunk(num_tokens, start, num_scored))

    @staticmethod
    def _announce(sequence: Sequence, step: StepPlan) -> None:
        """Add the sequence to `step.admitted`, so that the runner sets up its row."""
        step.admitted.append(
            AdmittedSequence(
                sequence.row,
                sequence.request,
                sequence.token_ids[sequence.num_prompt_tokens :],
                is_resumed=sequence.num_preemptions > 0,
            )
        )

    def _plan_chunk(
        self, sequence: Sequence, limit: int, new_blocks: NewBlocks, step: StepPlan
    ) -> None:
        """Plan the next `limit` of the first `num_prefill_tokens` tokens: the host has these."""
        start = sequence.num_computed_tokens
        end = start + limit
        is_pooled = sequence.request.pooling is not None
        num_logits = int(end == sequence.num_prefill_tokens and not is_pooled)
        num_prompt_logits = sequence.num_prompt_logits(start, end)
        state_slots = self._state_slots(sequence, end)
        sequence.num_computed_tokens = end
        sequence.num_in_flight += 1
        step.num_samples += num_logits
        step.num_pooled += is_pooled
        step.num_prompt_logits += num_prompt_logits
        step.num_tokens_left -= end - start
        step.scheduled.append(
            ScheduledSequence(
                sequence.row,
                start,
                end - start,
                sequence.token_ids[start:end],
                new_blocks.block_ids,
                num_logits,
                num_prompt_logits,
                is_pooled,
                sequence.is_held and start + 1 == end == sequence.num_prefill_tokens,
                new_blocks.window_block_ids,
                state_slots,
            )
        )
        sequence.is_held = False
        step.sequences.append(sequence)
        self.num_prompt_tokens += max(0, min(end, sequence.num_prompt_tokens) - start)
        self._cache.register(sequence.block_table, sequence.token_ids, end)


def _all_blocks(sequence: Sequence) -> NewBlocks:
    """The blocks of a sequence whose row is set up."""
    return NewBlocks(*(blocks.ids[:] for blocks in sequence.block_table.groups))
