"""Draft tokens for running sequences: the protocol of a drafter, and how drafts enter a step.

Drafts are guesses of the tokens that follow a sequence's last one. The step computes them beside
the last token. Sampling draws each position as plain decoding does, and keeps the tokens up to the
first that differs from its draft. So drafts do not change the output. The engine has no drafter of
its own yet; `build_engine(proposer=...)` takes one.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.sequence import Sequence
from ostinato.runtime.scheduling.step_plan import StepPlan
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence

__all__ = ("DraftPlanner", "Proposer")


class Proposer(Protocol):
    """A drafter."""

    @property
    def max_drafts(self) -> int:
        """The most draft tokens for one sequence in one step, at least 1.

        The engine plans memory for as many rows of logits.
        """
        ...

    def propose(self, request: Request, token_ids: Many[int], most: int) -> Many[int]:
        """Guess the next tokens of a sequence.

        Args:
            request: the sequence's request.
            token_ids: its prompt and the output so far; must not be changed.
            most: draft tokens that can be used, at least 1.

        Returns:
            Up to `most` token ids of the vocabulary; further ones are ignored.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""
        ...


class DraftPlanner:
    """Adds drafts to a planned step, within its remaining tokens and blocks.

    A draft preempts no sequence and delays no waiting one. Blocks with draft tokens are not
    registered, because the tokens are not known yet.

    Args:
        proposer: the drafter.
        cache: the KV cache manager.
        max_drafts: draft tokens of one sequence in one step, at most.

    Attributes:
        num_draft_tokens: draft tokens that were scheduled.
        num_accepted_tokens: draft tokens that were right.
    """

    def __init__(self, proposer: Proposer, cache: KVCacheManager, max_drafts: int) -> None:
        self.proposer = proposer
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._cache = cache
        self._max_drafts = max_drafts

    def add(self, step: StepPlan, num_running: int) -> None:
        """Extend the step's decode entries by drafts.

        Only sequences without another step in flight get drafts, because their last token is known.

        Args:
            step: a step in which everything else is planned.
            num_running: number of running sequences. One free block is left for each.
        """
        for index, sequence in enumerate(step.sequences):
            if step.budget_left < 1:
                break
            entry = step.scheduled[index]
            is_plain = entry.num_logits == 1 and not entry.token_ids and sequence.beam is None
            if is_plain and sequence.num_in_flight == 1:
                drafted = self._draft(entry, sequence, step, num_running)
                if drafted is not None:
                    step.scheduled[index] = drafted

    def _draft(
        self, entry: ScheduledSequence, sequence: Sequence, step: StepPlan, num_running: int
    ) -> ScheduledSequence | None:
        room = sequence.max_num_tokens - sequence.num_tokens - 1
        most = min(self._max_drafts, step.budget_left, room)
        if most < 1:
            return None
        draft = list(self.proposer.propose(sequence.request, sequence.token_ids, most))[:most]
        count = step.fitting_drafts(len(draft), entry.start + 1)
        count, new_block_ids = self._take_blocks(sequence, count, num_running)
        if count < 1:
            return None
        step.take_drafts(count, entry.start + 1)
        sequence.num_computed_tokens += count
        sequence.num_drafts = count
        self.num_draft_tokens += count
        return ScheduledSequence(
            entry.row,
            entry.start,
            1 + count,
            [sequence.token_ids[-1], *draft[:count]],
            [*entry.new_block_ids, *new_block_ids],
            1 + count,
        )

    def _take_blocks(
        self, sequence: Sequence, count: int, num_running: int
    ) -> tuple[int, list[int]]:
        """How many of `count` drafts have room in the table, and the new blocks for them."""
        cache, table = self._cache, sequence.block_table
        needed = sequence.num_computed_tokens + count
        room = len(table.block_ids) * cache.block_size
        if needed <= room:
            return count, []
        missing = -(-needed // cache.block_size) - len(table.block_ids)
        if missing + num_running <= cache.num_free_blocks:
            return count, cache.allocate(table, needed) or []
        return room - sequence.num_computed_tokens, []
