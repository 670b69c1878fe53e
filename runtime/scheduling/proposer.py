"""Draft tokens for running sequences: the protocol of a drafter, and how drafts enter a step.

A draft is a guess of the tokens that follow a sequence's last one. The step computes the guesses
beside the last token; sampling draws each position as plain decoding would and keeps the tokens up
to the first that differs from its guess. So drafts change how many tokens a step gives, and never
which. The engine has no drafter of its own yet; `build_engine(proposer=...)` takes one.
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
        """The most guesses for one sequence in one step, at least 1. The engine plans its rows of
        logits for them.
        """
        ...

    def propose(self, request: Request, token_ids: Many[int], most: int) -> Many[int]:
        """Guess what follows.

        Args:
            request: what the sequence is computed for.
            token_ids: its prompt and the output that has arrived; not to be changed.
            most: guesses that can be used, at least 1.

        Returns:
            Up to `most` token ids of the vocabulary; those beyond `most` are ignored.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        ...


class DraftPlanner:
    """Adds drafts to a planned step, with what tokens and blocks the step leaves over.

    Nothing is preempted for a draft, no waiting sequence loses its turn, and a drafted token is no
    known token: no block is registered with a guess in it.

    Args:
        proposer: the drafter.
        cache: the blocks.
        max_drafts: guesses for one sequence in one step.

    Attributes:
        num_draft_tokens: guesses that were scheduled.
        num_accepted_tokens: of which were right.
    """

    def __init__(self, proposer: Proposer, cache: KVCacheManager, max_drafts: int) -> None:
        self.proposer = proposer
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._cache = cache
        self._max_drafts = max_drafts

    def add(self, step: StepPlan, num_running: int) -> None:
        """Extend the step's decode entries by drafts.

        Only a sequence without another step in flight gets one: its last token is on the host.

        Args:
            step: all else is planned.
            num_running: sequences that run; so many free blocks are left for them.
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
