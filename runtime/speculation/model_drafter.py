"""The drafter with a model: a second, smaller model draws the drafts of all sequences of a step.

The draft model has programs, buffers and a KV cache of its own. Its cache has the target's number
of blocks, and a sequence's block table is the same for both models. The keys and values of a
position lie in the same block and slot of either cache. So the draft model allocates no blocks, and
it shares blocks between sequences wherever the target does.

The draft model computes a sequence only when drafts for it are wanted. It then computes all tokens
that its cache lacks: at first the prompt, later usually one or two tokens. A block counts as
computed if the draft model filled it for the hash that the block has now.

The drafts are drawn with the request's sampling parameters, and with the same random numbers as the
target at the same positions. So a draft model that agrees with the target draws the same tokens at
any temperature. Penalties, grammars and limits of tokens are left out. So fewer drafts are
accepted for requests that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.kv.block_table import BlockTable
from ostinato.runtime.speculation.guessing_drafter import GuessingDrafter, draft_request
from ostinato.runtime.speculation.proposer import DraftJob, Proposer
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import (
    AdmittedSequence,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)

__all__ = ("ModelDrafter",)


class _Row:
    """The part of a row's sequence that the draft model's cache holds."""

    __slots__ = ("num_computed", "num_guesses", "num_sent_blocks", "num_whole")

    def __init__(self, num_whole: int, block_size: int) -> None:
        self.num_whole = num_whole  # number of first blocks that are full and noted as computed
        self.num_computed = num_whole * block_size  # computed positions with tokens of the sequence
        self.num_guesses = 0  # draft tokens that were computed after these positions
        self.num_sent_blocks = 0  # blocks of the table that are in the draft model's step buffers

    def settle(self, num_right: int) -> None:
        """Keep up to `num_right` of the guesses, counted from the first."""
        self.num_computed += min(num_right, self.num_guesses)
        self.num_guesses = 0


class ModelDrafter(GuessingDrafter):
    """Implements `BatchProposer`.

    Args:
        execute: runs a step of the draft model, whose KV cache has the target's number of blocks.
            The result has the drawn tokens, or negative numbers that stand for them.
        block_size: tokens of a block of the target's first group (`KVGroup`).
        max_drafts: draft tokens of one sequence in one step, at most.
        max_num_tokens: tokens of the draft model's largest step.
        max_model_len: tokens of a sequence that the draft model can have.
        texts: a drafter whose drafts from text go first, such as `TextDrafter`.
        units: units of such a block.
        costs: the draft model's step-cost table; None = not measured.
        is_queued: `execute` does not wait for the tokens.
        idle: called when the engine has no work.
        close: frees the draft model.
    """

    def __init__(  # noqa: PLR0913 - its parts, put together in one place
        self,
        execute: Callable[[SchedulerOutput], StepResult],
        *,
        block_size: int,
        max_drafts: int,
        max_num_tokens: int,
        max_model_len: int,
        texts: Proposer,
        units: int = 1,
        costs: CostTable | None = None,
        is_queued: bool = False,
        idle: Callable[[], object] = lambda: None,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(max_drafts, texts, is_queued=is_queued)
        self._execute = execute
        self._block_size = block_size
        self._units = units
        self._max_num_tokens = max_num_tokens
        self._max_model_len = max_model_len
        self._max_blocks = -(-max_model_len // block_size)
        self.costs = costs
        self._idle = idle
        self._close = close
        self._rows: dict[int, _Row] = {}
        self._whole: dict[int, BlockHash] = {}  # by block id: the contents that were computed

    def _room(self, request: Request, num_tokens: int) -> int:
        # The last draft token is drawn, but not computed.
        return self._max_model_len - num_tokens + 1

    def admit(self, row: int, request: Request) -> None:
        self._rows.pop(row, None)

    def settle(self, row: int, num_right: int) -> None:
        if row in self._rows:
            self._rows[row].settle(num_right)

    def follow(self, jobs: Sequence[DraftJob]) -> None:
        """Does nothing. A draft model computes a sequence only when drafts for it are wanted."""

    def idle(self) -> None:
        self._idle()

    def close(self) -> None:
        self._close()

    def draw(self, jobs: Sequence[DraftJob], most_tokens: int) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in jobs]
        drawing = self._catch_up(jobs, most_tokens, drafts)
        for place in range(1, max((job.count for job in jobs), default=0)):
            drawing = [index for index in drawing if jobs[index].count > place]
            if not drawing:
                break
            scheduled = [
                ScheduledSequence(
                    jobs[index].row,
                    len(jobs[index].token_ids) + place - 1,
                    1,
                    drafts[index][-1:],
                    [],
                    1,
                )
                for index in drawing
            ]
            self._run(scheduled, [], drawing, drafts)
        for job, draft in zip(jobs, drafts, strict=True):
            if draft:  # the last draft token was drawn, but not computed
                self._rows[job.row].num_guesses = len(draft) - 1
        return drafts

    def _catch_up(
        self, jobs: Sequence[DraftJob], most_tokens: int, drafts: list[list[int]]
    ) -> list[int]:
        """Compute the tokens that the cache lacks, and draw the first draft token of each sequence.

        Returns:
            Indices of the jobs that have their first draft token.
        """
        admitted: list[AdmittedSequence] = []
        starts: list[int] = []
        for job in jobs:
            row = self._rows.get(job.row)
            if row is None:
                num_whole = self._count_whole(job.table)
                row = self._rows[job.row] = _Row(num_whole, self._block_size)
                admitted.append(AdmittedSequence(job.row, draft_request(job.request), []))
            row.settle(0)  # drafts that were not verified are not kept
            # The last token is always computed, because the first draft needs its logits.
            starts.append(min(row.num_computed, len(job.token_ids) - 1))
        limits = self._chunk_limits(jobs, starts, most_tokens)
        scheduled: list[ScheduledSequence] = []
        drawing: list[int] = []
        for index, (job, start, limit) in enumerate(zip(jobs, starts, limits, strict=True)):
            if limit:
                is_last = start + limit == len(job.token_ids)
                scheduled.append(self._chunk(job, start, limit, is_last=is_last))
                if is_last:
                    drawing.append(index)
        if not scheduled:
            for one in admitted:  # no step has given the draft model's sampler these sequences
                del self._rows[one.row]
            return []
        self._run(scheduled, admitted, drawing, drafts)
        for job, start, limit in zip(jobs, starts, limits, strict=True):
            row = self._rows[job.row]
            row.num_computed = max(row.num_computed, start + limit)
            self._note_whole(row, job.table)
        return drawing

    def _chunk_limits(
        self, jobs: Sequence[DraftJob], starts: Sequence[int], most_tokens: int
    ) -> list[int]:
        """Tokens of each sequence that are computed now. Sequences with few tokens go first."""
        limits = [0] * len(jobs)
        left, room = most_tokens, self._max_num_tokens
        missing = [len(job.token_ids) - start for job, start in zip(jobs, starts, strict=True)]
        for index in sorted(range(len(jobs)), key=missing.__getitem__):
            is_usual = missing[index] <= self._max_drafts + 1
            limit = min(missing[index], room if is_usual else max(0, min(left, room)))
            limits[index] = limit
            room -= limit
            left -= limit
        return limits

    def _chunk(self, job: DraftJob, start: int, limit: int, *, is_last: bool) -> ScheduledSequence:
        row = self._rows[job.row]
        end = start + limit
        written = end + job.count - 1 if is_last else end
        for index in range(row.num_whole, -(-written // self._block_size)):
            self._whole.pop(job.table.block_ids[index], None)
        block_ids = job.table.block_ids[row.num_sent_blocks : self._max_blocks]
        row.num_sent_blocks += len(block_ids)
        token_ids = list(job.token_ids[start:end])
        return ScheduledSequence(job.row, start, limit, token_ids, block_ids, int(is_last))

    def _run(
        self,
        scheduled: list[ScheduledSequence],
        admitted: list[AdmittedSequence],
        drawing: Sequence[int],
        drafts: list[list[int]],
    ) -> None:
        """Run a step of the draft model, and add its tokens to the drafts of `drawing`."""
        num_tokens = sum(entry.num_new_tokens for entry in scheduled)
        result = self._execute(SchedulerOutput(scheduled, admitted, num_tokens))
        for index, token in zip(drawing, result.token_ids, strict=True):
            drafts[index].append(token)

    def _count_whole(self, table: BlockTable) -> int:
        """How many blocks of a table, from the first, the draft model has computed.

        They can have been computed for another sequence.
        """
        count = 0
        hashes = table.block_hashes(self._units)
        for block_id, block_hash in zip(table.block_ids, hashes, strict=False):
            if self._whole.get(block_id) != block_hash:
                break
            count += 1
        return count

    def _note_whole(self, row: _Row, table: BlockTable) -> None:
        """Note the full blocks as computed. A block without a hash is noted later."""
        hashes = table.block_hashes(self._units)
        num_full = min(row.num_computed // self._block_size, len(hashes))
        for index in range(row.num_whole, num_full):
            self._whole[table.block_ids[index]] = hashes[index]
        row.num_whole = max(row.num_whole, num_full)
