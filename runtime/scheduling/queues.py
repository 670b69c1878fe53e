"""The queues of a scheduler: waiting, running and draining sequences, their rows and KV blocks.

    add -> waiting -> running -> finished
             ^  |        |
             |  loading  | preempt: row and blocks are freed
             +-----------+

A sequence is draining if it left `running` while a step in flight uses its row and blocks. The row
and the blocks become free when the result of that step has been read (`settle`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from operator import attrgetter

from ostinato.runtime.kv.block_table import BlockTable
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.sequences.beam_groups import is_parked
from ostinato.runtime.scheduling.sequences.sequence import Sequence, SequenceStatus

__all__ = ("SequenceQueues", "by_order", "check")

by_order = attrgetter("order")
_RUNNING = SequenceStatus.running
_PREEMPTED = SequenceStatus.preempted
_PARKED = SequenceStatus.parked
_FINISHED = SequenceStatus.finished


class SequenceQueues:
    """The sequences of a scheduler by status, and the rows.

    Args:
        cache: the KV cache manager.
        num_rows: sequences that may run at once.

    Attributes:
        waiting: sequences without rows and blocks, in the policy's order.
        running: sequences with a row and blocks, in the policy's order.
        draining: preempted, parked or finished sequences that are part of a step in flight.
        num_preemptions: preemptions since the start.
    """

    def __init__(self, cache: KVCacheManager, num_rows: int) -> None:
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.draining: set[Sequence] = set()
        self.num_preemptions = 0
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows))  # heap

    @property
    def num_free_rows(self) -> int:
        """Rows that no sequence holds."""
        return len(self._free_rows)

    def waiting_before(self, order: tuple[int, ...]) -> list[Sequence]:
        """Sequences that wait for a row and come before `order`.

        Preempted sequences that are still draining count too.
        """
        first = self.waiting[: bisect_left(self.waiting, order, key=by_order)]
        return [*first, *(s for s in self.draining if s.status is _PREEMPTED and s.order < order)]

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for a row.

        Preempted sequences that are still draining count too.
        """
        count = len(self.waiting)
        if self.draining:
            count += sum(sequence.status is _PREEMPTED for sequence in self.draining)
        return count

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence without row and blocks into `waiting`, in the policy's order."""
        sequence.status = SequenceStatus.waiting
        insort(self.waiting, sequence, key=by_order)

    def start(self, sequence: Sequence, index: int) -> None:
        """Give a sequence with blocks a row, and insert it into `running` at `index`."""
        sequence.row = heappop(self._free_rows)
        sequence.status = _RUNNING
        self.running.insert(index, sequence)

    def place(self, sequence: Sequence) -> None:
        """Continue a beam that does not run.

        It runs if it has blocks and a row is free. Otherwise it waits, and its tokens are computed
        again, except those that the prefix cache has.
        """
        if sequence.status is _RUNNING:
            return
        if not sequence.block_table.is_empty and self._free_rows:
            self.start(sequence, bisect_left(self.running, sequence.order, key=by_order))
            return
        self.free_blocks(sequence)
        self.wait(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Finish a sequence without an output."""
        status = sequence.status
        if status is _RUNNING:
            self.running.remove(sequence)
            self._retire(sequence, _FINISHED)
            return
        if status is SequenceStatus.waiting:
            index = bisect_left(self.waiting, sequence.order, key=by_order)
            check(self.waiting[index] is sequence, f"{sequence!r} is not at its place in the queue")
            del self.waiting[index]
        sequence.status = _FINISHED

    def preempt_last(self) -> Sequence:
        """Preempt the last running sequence: free its row and blocks, and let it wait again."""
        sequence = self.running.pop()
        self._count_preemption(sequence)
        self._retire(sequence, _PARKED if is_parked(sequence) else _PREEMPTED)
        return sequence

    def give_up(self, sequence: Sequence) -> None:
        """Preempt a running sequence. The caller calls `settle` and `remove_ended` afterwards."""
        self._count_preemption(sequence)
        sequence.status = _PREEMPTED

    def _count_preemption(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        sequence.num_loaded_blocks = 0
        self.num_preemptions += 1
        self.cache.note_preemption(sequence.block_table)

    def release_parked(self) -> bool:
        """Free the rows and blocks of parked beams, so that the beams they wait for can run.

        Returns:
            Whether there were parked beams.
        """
        parked = [sequence for sequence in self.running if is_parked(sequence)]
        for sequence in parked:
            self.running.remove(sequence)
            self._retire(sequence, _PARKED)
        return bool(parked)

    def settle(self, sequence: Sequence) -> None:
        """Free the row and blocks of a draining sequence, if no step in flight uses them any more.

        A preempted sequence then goes to `waiting`.
        """
        if sequence.num_in_flight:
            self.draining.add(sequence)
            return
        self.draining.discard(sequence)
        self.free_blocks(sequence)
        heappush(self._free_rows, sequence.row)
        if sequence.status is _PREEMPTED:
            self.wait(sequence)

    def sort(self) -> None:
        """Sort the queues again. Called after the `order` of sequences has changed."""
        self.waiting.sort(key=by_order)
        self.running.sort(key=by_order)

    def remove_ended(self) -> None:
        """Remove the sequences from `running` that no longer run."""
        self.running = [s for s in self.running if s.status is _RUNNING]

    def free_blocks(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence and set its computed tokens to 0."""
        self.cache.free(sequence.block_table)
        sequence.num_computed_tokens = 0
        sequence.is_held = False

    def num_reclaimable_blocks(self, sequence: Sequence, kept: Collection[int] = ()) -> int:
        """Blocks that become free when the sequence frees its table, without those `kept`."""
        return self.cache.num_reclaimable_blocks(sequence.block_table, kept)

    def num_draining_blocks(self) -> int:
        """Blocks that become free when the steps in flight are read."""
        return sum(map(self.num_reclaimable_blocks, self.draining))

    def tables(self) -> Iterator[BlockTable]:
        """The block tables of all sequences that can hold blocks."""
        return (sequence.block_table for sequence in (*self.running, *self.draining))

    def check_integrity(self) -> None:
        """Compare rows, queues and statuses with each other. O(sequences).

        Raises:
            AssertionError: rows are lost, a queue is out of order, a waiting sequence holds blocks.
        """
        holders = (*self.running, *self.draining)
        rows = sorted([*self._free_rows, *(sequence.row for sequence in holders)])
        check(rows == list(range(self._num_rows)), f"rows are lost or doubled: {rows}")
        for queue in (self.running, self.waiting):
            orders = [sequence.order for sequence in queue]
            check(orders == sorted(orders), f"a queue is out of order: {queue}")
        for sequence in self.waiting:
            check(sequence.block_table.is_empty, f"{sequence!r} waits and holds blocks")

    def _retire(self, sequence: Sequence, status: SequenceStatus) -> None:
        sequence.status = status
        self.settle(sequence)


def check(ok: bool, message: str) -> None:
    """Raises AssertionError unless `ok`."""
    if not ok:
        raise AssertionError(f"scheduler: {message}")
