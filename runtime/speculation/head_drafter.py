"""The drafter with a head, which drafts from the target model's hidden states (EAGLE-3, MTP).

The head's input at position p is the target's hidden state at p and the token at p + 1. So a
sequence of n tokens has inputs for positions 0 to n - 2, and the output of position n - 2 is the
first draft token. Each further draft token takes one more position. Its input is the head's output
at the position before.

The head's KV cache has the target's number of blocks. A sequence has one block table for both, as
with a draft model (model_drafter.py). The target's hidden states exist only in the step that
computes them. So the head computes positions soon after the target, even if no drafts are wanted.
The target can find blocks in its prefix cache that the head has not computed. Then the head treats
the sequence as if it began at a later block: the first from which on the head has every block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.speculation.guessing_drafter import GuessingDrafter, draft_request
from ostinato.runtime.speculation.proposer import DraftJob, Proposer
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import AdmittedSequence, ScheduledSequence, SchedulerOutput

__all__ = ("MOST_WAITING", "DraftHead", "HeadDrafter")

# Waiting positions are those that the target has computed and the head has not. The head computes a
# sequence with this many waiting positions even if no drafts are wanted.
MOST_WAITING = 16


class DraftHead(Protocol):
    """A head with its KV cache.

    Positions in its steps are counted from the first block that the head has of a sequence.
    """

    def watch(self, row: int) -> None:
        """Note that a new sequence has the row, and keep its hidden states from the target."""
        ...

    def unwatch(self, row: int) -> None:
        """Keep no hidden states of the row."""
        ...

    def span(self, row: int) -> tuple[int, int]:
        """The positions whose hidden states are kept: the first one, and one past the last."""
        ...

    def compute(self, output: SchedulerOutput, begins: Sequence[int]) -> list[int]:
        """Run a step with the target's hidden states, which are dropped afterwards.

        Args:
            output: the step.
            begins: for each entry, its first position, counted from the sequence's beginning.

        Returns:
            The drawn tokens, or negative numbers that stand for them.
        """
        ...

    def extend(self, output: SchedulerOutput, kept: Sequence[int]) -> list[int]:
        """Run a step of one token for each sequence, with the head's own outputs as input.

        Args:
            output: the step.
            kept: for each entry, the index of its token among the tokens of the previous step.
        """
        ...

    def idle(self) -> None:
        """Allow background work to use the processors."""
        ...

    def close(self) -> None:
        """Free the head's memory and threads."""
        ...


class _Whole(NamedTuple):
    """A block that the head has computed."""

    contents: BlockHash
    base: int  # `_Row.base` of the sequence for which the head computed the block


class _Row:
    """The part of a row's sequence that the head's cache has."""

    __slots__ = ("base", "end", "is_sent", "num_sent_blocks", "num_whole")

    def __init__(self, base: int, begin: int, block_size: int) -> None:
        # Index, in the sequence's block table, of the first block that the head has computed. The
        # head's position 0 is the first position of this block.
        self.base = base
        self.end = begin  # one past the last position that the head has computed
        self.num_whole = begin // block_size  # blocks before this index are noted as computed
        self.num_sent_blocks = base
        self.is_sent = False  # whether the head's sampler has the sequence


class HeadDrafter(GuessingDrafter):
    """Implements `BatchProposer`.

    Args:
        head: the head.
        block_size: tokens of a block of the target's first group (`KVGroup`).
        max_drafts: draft tokens of one sequence in one step, at most.
        max_num_tokens: tokens of the head's largest step.
        max_model_len: positions of a sequence that the head can have.
        texts: a drafter whose drafts from text go first, such as `TextDrafter`.
        units: units of such a block.
        costs: the head's step-cost table; None = not measured.
        is_queued: the head's steps are queued, and their tokens stay on the device.
    """

    def __init__(  # noqa: PLR0913 - its parts, put together in one place
        self,
        head: DraftHead,
        *,
        block_size: int,
        max_drafts: int,
        max_num_tokens: int,
        max_model_len: int,
        texts: Proposer,
        units: int = 1,
        costs: CostTable | None = None,
        is_queued: bool = False,
    ) -> None:
        super().__init__(max_drafts, texts, is_queued=is_queued)
        self._head = head
        self._block_size = block_size
        self._units = units
        self._max_num_tokens = max_num_tokens
        self._max_model_len = max_model_len
        self.costs = costs
        self._rows: dict[int, _Row] = {}
        self._watched: dict[str, int] = {}  # request -> row
        self._whole: dict[int, _Whole] = {}  # by block id

    def _room(self, request: Request, num_tokens: int) -> int:
        row = self._rows.get(self._watched.get(request.request_id, -1))
        if row is None:
            return self._max_drafts
        # The head draws draft token j (0, 1, ...) at position `num_tokens - 2 + j`. Its positions
        # end before `_context_end(row)`.
        return self._context_end(row) - num_tokens + 2

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        row = self._watched.pop(request_id, None)
        if row is not None and row not in self._watched.values():
            self._head.unwatch(row)

    def admit(self, row: int, request: Request) -> None:
        self._rows.pop(row, None)
        for request_id in [one for one, watched in self._watched.items() if watched == row]:
            del self._watched[request_id]
        if request.sampling.speculation and not request.sampling.use_beam_search:
            self._watched[request.request_id] = row
            self._head.watch(row)
        else:
            self._head.unwatch(row)

    def settle(self, row: int, num_right: int) -> None:
        """Does nothing. The head computes accepted drafts again, with the target's states."""

    def idle(self) -> None:
        self._head.idle()

    def close(self) -> None:
        self._head.close()

    def follow(self, jobs: Sequence[DraftJob]) -> None:
        """Compute the sequences with many waiting positions, except their last position."""
        due: list[tuple[DraftJob, int]] = []
        for job in jobs:
            if job.request.request_id not in self._watched:
                continue
            row = self._row_of(job)
            computed = self._head.span(job.row)[1]  # in a prompt: the end of the chunks so far
            stop = min(computed, len(job.token_ids) - 2, self._context_end(row))
            if stop - row.end >= MOST_WAITING:
                due.append((job, stop))
        while due:
            self._compute(due, lambda job, end: 0)
            due = [(job, stop) for job, stop in due if self._rows[job.row].end < stop]

    def draw(self, jobs: Sequence[DraftJob], most_tokens: int) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in jobs]
        due: list[tuple[DraftJob, int]] = []
        chosen: list[int] = []
        for index, job in enumerate(jobs):
            row, stop = self._row_of(job), len(job.token_ids) - 1
            limit = min(self._head.span(job.row)[1], self._context_end(row))
            if row.end < stop <= limit:
                due.append((job, stop))
                chosen.append(index)
        if not due:
            return drafts
        stops = {job.row: stop for job, stop in due}
        tokens = self._compute(due, lambda job, end: int(end == stops[job.row]))
        drawing = [
            index
            for index, (job, stop) in zip(chosen, due, strict=True)
            if self._rows[job.row].end == stop
        ]
        for index, token in zip(drawing, tokens, strict=True):
            drafts[index].append(token)
        self._extend(jobs, drawing, drafts)
        return drafts

    def _extend(
        self, jobs: Sequence[DraftJob], drawing: list[int], drafts: list[list[int]]
    ) -> None:
        """Draw the draft tokens after the first. A step draws one token for each sequence."""
        for place in range(1, max((job.count for job in jobs), default=0)):
            kept: list[int] = []
            scheduled: list[ScheduledSequence] = []
            for number, index in enumerate(drawing):
                job = jobs[index]
                row = self._rows[job.row]
                position = row.end + place - 1
                if job.count > place and position < self._context_end(row):
                    kept.append(number)
                    start = position - row.base * self._block_size
                    scheduled.append(
                        ScheduledSequence(job.row, start, 1, drafts[index][-1:], [], 1)
                    )
            if not kept:
                return
            drawing = [drawing[number] for number in kept]
            tokens = self._head.extend(SchedulerOutput(scheduled, [], len(scheduled)), kept)
            for index, token in zip(drawing, tokens, strict=True):
                drafts[index].append(token)

    def _compute(
        self, due: Sequence[tuple[DraftJob, int]], num_logits: Callable[[DraftJob, int], int]
    ) -> list[int]:
        """Compute sequences up to given positions, until the step is full.

        Args:
            due: sequences, and the position up to which each is computed.
            num_logits: called with a sequence and a position. Returns 1 if a token is drawn when
                the sequence is computed up to this position, else 0.

        Returns:
            The drawn tokens.
        """
        room = self._max_num_tokens
        scheduled: list[ScheduledSequence] = []
        admitted: list[AdmittedSequence] = []
        begins: list[int] = []
        for job, stop in due:
            row = self._rows[job.row]
            begin, end = row.end, min(stop, row.end + room)
            if begin == end:
                continue
            room -= end - begin
            if not row.is_sent:
                row.is_sent = True
                admitted.append(AdmittedSequence(job.row, draft_request(job.request), []))
            scheduled.append(self._entry(job, row, begin, end, num_logits(job, end)))
            begins.append(begin)
            row.end = end
        num_tokens = self._max_num_tokens - room
        tokens = self._head.compute(SchedulerOutput(scheduled, admitted, num_tokens), begins)
        for job, _ in due:
            self._note_whole(self._rows[job.row], job)
        return tokens

    def _entry(
        self, job: DraftJob, row: _Row, begin: int, end: int, num_logits: int
    ) -> ScheduledSequence:
        size, table = self._block_size, job.table.block_ids
        written = end + max(0, job.count - 1) if num_logits else end
        for block_id in table[begin // size : -(-written // size)]:
            self._whole.pop(block_id, None)
        last = row.base + -(-self._max_model_len // size)
        new_blocks = table[row.num_sent_blocks : last]
        row.num_sent_blocks += len(new_blocks)
        token_ids = list(job.token_ids[begin + 1 : end + 1])
        start = begin - row.base * size
        return ScheduledSequence(job.row, start, end - begin, token_ids, new_blocks, num_logits)

    def _row_of(self, job: DraftJob) -> _Row:
        """The row of a sequence.

        The head may have missed positions: its row ends before the first position whose hidden
        states are kept. The present row is then replaced by one that begins at these hidden states.
        """
        row, (begin, end) = self._rows.get(job.row), self._head.span(job.row)
        if row is None or (end > begin and begin > row.end):
            base = self._base_of(job, begin) if end > begin else len(job.token_ids)
            first = max(begin, base * self._block_size)
            row = _Row(base, first, self._block_size)
            if end > begin:
                self._rows[job.row] = row
        return row

    def _base_of(self, job: DraftJob, begin: int) -> int:
        """The block at which a sequence begins for the head.

        The head has no hidden states before the position `begin`.
        """
        size, table = self._block_size, job.table
        num_before, hashes = -(-begin // size), table.block_hashes(self._units)
        if begin % size or not num_before or len(hashes) < num_before:
            return num_before
        last = self._whole.get(table.block_ids[num_before - 1])
        if last is None:
            return num_before
        for index in range(last.base, num_before):
            known = self._whole.get(table.block_ids[index])
            if known != _Whole(hashes[index], last.base):
                return num_before
        return last.base

    def _context_end(self, row: _Row) -> int:
        """One past the last position of a sequence that the head can have."""
        return row.base * self._block_size + self._max_model_len

    def _note_whole(self, row: _Row, job: DraftJob) -> None:
        """Note the full blocks as computed. A block without a hash is noted later."""
        hashes = job.table.block_hashes(self._units)
        num_full = min(row.end // self._block_size, len(hashes))
        for index in range(row.num_whole, num_full):
            self._whole[job.table.block_ids[index]] = _Whole(hashes[index], row.base)
        row.num_whole = max(row.num_whole, num_full)
