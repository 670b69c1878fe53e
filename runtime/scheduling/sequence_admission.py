"""Admits waiting sequences, and preempts running ones that come after them in the policy's order.

A sequence is admitted only if there are blocks for all its known tokens, and one spare block for
each running sequence ahead of it. Without the spare blocks, the sequences ahead would soon preempt
the new sequence. With recurrent layers, a slot for its states must be free too.
"""

from __future__ import annotations

from ostinato.runtime.kv.prefix_index import PrefixMatch
from ostinato.runtime.scheduling.loads import BlockLoads
from ostinato.runtime.scheduling.queues import SequenceQueues
from ostinato.runtime.scheduling.sequences.sequence import Sequence, SequenceStatus
from ostinato.runtime.scheduling.step_plan import StepPlan

__all__ = ("SequenceAdmission",)


class SequenceAdmission:
    """Gives waiting sequences rows and blocks, in the policy's order.

    Args:
        queues: the sequences by status.
        loads: the loads of blocks from a slower tier.
        whole_prompts: compute each prompt in one step, as encoders need it.
    """

    def __init__(self, queues: SequenceQueues, loads: BlockLoads, *, whole_prompts: bool) -> None:
        self._queues = queues
        self._cache = queues.cache
        self._loads = loads
        self._whole_prompts = whole_prompts
        self._blocked: Sequence | None = None  # the sequence that last lacked blocks
        self._blocked_room = 0  # free blocks when it lacked blocks, without the spare blocks

    def start_next(self, step: StepPlan) -> tuple[Sequence, int] | None:
        """Start the first waiting sequence: give it a row and blocks for all its known tokens.

        If this step writes states that would spare the sequence some tokens, it waits for the next
        step, which can read them.

        The sequence is inserted into `running` after the sequences that are planned already.

        Args:
            step: the step that is being planned; it is closed if the sequence has to wait.

        Returns:
            The sequence and the number of its tokens that fit into the step. None if the sequence
            has to wait, or left the queue to load blocks of its prefix from a slower tier.
        """
        queues = self._queues
        sequence = queues.waiting[0]
        match = self._make_room(sequence, step)
        if sequence.status is SequenceStatus.loading:
            return None
        if match is not None:
            start = match.num_tokens
            num_left = sequence.num_tokens - start
            num_others = len(queues.running) - step.num_grown
            limit = step.limit_of(sequence, start, num_left, num_others)
            if self._whole_prompts and not step.scheduled:
                limit = num_left  # an empty step takes one prompt, even one above the step's limit
            if limit >= (num_left if self._whole_prompts else 1):
                del queues.waiting[0]
                self._start(sequence, match, step)
                return sequence, limit
        step.is_closed = True
        return None

    def _start(self, sequence: Sequence, match: PrefixMatch, step: StepPlan) -> None:
        cache = self._cache
        copies = cache.admit(sequence.block_table, match, sequence.num_tokens)
        assert copies is not None, f"{sequence!r} has room but was not admitted"
        step.block_copies += copies
        num_cached = match.num_tokens
        sequence.num_computed_tokens = num_cached
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
            cache.count_lookup(sequence.num_prompt_tokens, num_cached)
        sequence.num_prefill_tokens, sequence.num_repeats = sequence.num_tokens, 0
        self._queues.start(sequence, step.num_grown)
        step.num_grown += 1

    def _make_room(self, sequence: Sequence, step: StepPlan) -> PrefixMatch | None:
        """Make sure that a row and blocks are free for a waiting sequence; preempt if necessary.

        Returns:
            The sequence's cached prefix; None if the sequence has to wait or has started a load.
        """
        queues, cache = self._queues, self._cache
        behind = queues.running[step.num_grown :]
        has_row = self._has_row(sequence)
        if not (has_row or behind):
            self._reserve_slot()
            return None
        room = cache.num_free_blocks - step.num_grown
        if sequence is self._blocked and room <= self._blocked_room and not behind:
            return None  # the prefix of a long prompt is not looked up in every step
        match = cache.match_prefix(
            sequence.block_table, sequence.token_ids, sequence.max_cached_tokens
        )
        if match.has_fresh_state:
            return None
        if match.places and self._load(sequence, match, step):
            return None
        missing = self._num_missing_blocks(sequence, match, step)
        if not (has_row and missing <= 0) and behind:
            self._preempt_behind(behind, missing, match, has_row=has_row)
            missing = self._num_missing_blocks(sequence, match, step)
            has_row = self._has_row(sequence)
        if has_row and missing <= 0:
            return match
        if missing > 0:
            self._blocked = sequence
            self._blocked_room = cache.num_free_blocks - step.num_grown
        else:
            self._reserve_slot()
        return None

    def _reserve_slot(self) -> None:
        """Reserve a slot for states in the next step if the waiting sequence lacks only a slot.

        Without it, running sequences could take every slot that becomes free for checkpoints.
        """
        states = self._cache.states
        if states is not None and not states.num_free and self._queues.num_free_rows:
            states.reserve()

    def _has_row(self, sequence: Sequence) -> bool:
        """Whether a row is free for a sequence, and a slot for its states."""
        states = self._cache.states
        if states is not None and not states.num_free:
            return False
        # A loading sequence that comes before this one would take the row from it.
        return self._queues.num_free_rows > self._loads.num_before(sequence.order)

    def _load(self, sequence: Sequence, match: PrefixMatch, step: StepPlan) -> bool:
        """Let a sequence wait for a load if possible; returns whether it left the queue."""
        transfer = self._loads.begin(sequence, match, len(self._queues.running))
        if transfer is not None:
            step.transfers.append(transfer)
        if sequence.status is not SequenceStatus.loading:
            return False
        del self._queues.waiting[0]
        return True

    def _num_missing_blocks(self, sequence: Sequence, match: PrefixMatch, step: StepPlan) -> int:
        """Blocks that are missing to admit a sequence.

        One spare block counts for each sequence ahead of it.
        """
        cache = self._cache
        needed = cache.num_missing_blocks(sequence.num_tokens, match) + step.num_grown
        return needed - cache.num_free_blocks

    def _preempt_behind(
        self, behind: list[Sequence], missing: int, match: PrefixMatch, *, has_row: bool
    ) -> None:
        """Preempt sequences of `behind`, the last first, until a row and enough blocks are free.

        No sequence is preempted if preempting all of them would not free enough, or if draining
        sequences and loads will free enough. Blocks of `match` that a sequence holds alone do not
        count, because the waiting sequence takes them.
        """
        queues, states = self._queues, self._cache.states
        missing -= queues.num_draining_blocks() + self._loads.num_blocks
        needs_row = not (has_row or queues.draining)
        needs_slot = False
        if needs_row and states is not None and not states.num_free:
            needs_row, needs_slot = not queues.num_free_rows, not states.num_leaving
        num_victims, kept = 0, match.held()
        while (missing > 0 or needs_row or needs_slot) and num_victims < len(behind):
            num_victims += 1
            victim = behind[-num_victims]
            missing -= queues.num_reclaimable_blocks(victim, kept)
            needs_row = False
            if needs_slot and states is not None:
                needs_slot = not states.is_sole_holder(victim.block_table)
        if missing > 0 or needs_row or needs_slot:
            return
        for _ in range(num_victims):
            queues.preempt_last()
