"""Sequences that wait until the next blocks of their prefix are loaded from a slower tier.

A load fills newly allocated device blocks. When the load ends, these become cached blocks, and the
sequences that waited for them go back to the waiting queue. Admission then finds the longer prefix.
Blocks that could not be loaded are computed. After a load of a sequence, its next load must reach
farther. Otherwise it could load the same blocks again and again, if they are evicted before its
admission.
"""

from __future__ import annotations

from collections.abc import Iterator

from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.kv.block_table import BlockTable
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.kv.prefix_index import PrefixMatch
from ostinato.runtime.scheduling.sequences.sequence import Sequence, SequenceStatus
from ostinato.runtime.scheduling.step_plan import StepPlan
from ostinato.runtime.types.step import BlockTransfer

__all__ = ("BlockLoads",)


class _Load:
    """One transfer and the sequences that wait for it. The first sequence began it."""

    def __init__(self, transfer: BlockTransfer, table: BlockTable, sequence: Sequence) -> None:
        self.transfer = transfer
        self.table = table  # the matched device blocks, then the blocks that the transfer fills
        self.token_ids = sequence.token_ids[:]
        self.sequences = [sequence]
        self.is_abandoned = False


class BlockLoads:
    """All loads of a scheduler that have not ended.

    Args:
        cache: the KV cache manager.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._loads: dict[int, _Load] = {}  # by transfer id
        self._by_hash: dict[BlockHash, _Load] = {}  # by the hash of the first block that is loaded
        self._num_begun = 0
        self._waiting: list[BlockTransfer] = []  # loads that wait for a step

    def __bool__(self) -> bool:
        return bool(self._loads)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a load."""
        return len(self.sequences()) if self._loads else 0

    @property
    def num_blocks(self) -> int:
        """Device blocks that become free when the loads end; they stay in the prefix cache.

        The blocks of abandoned loads do not count, because these loads may never end.
        """
        reclaimable = self._cache.num_reclaimable_blocks
        loads = self._loads.values()
        return sum(reclaimable(load.table) for load in loads if not load.is_abandoned)

    def num_before(self, order: tuple[int, ...]) -> int:
        """Sequences that wait for a load and come before `order`."""
        return sum(one.order < order for one in self.sequences()) if self._loads else 0

    def tables(self) -> Iterator[BlockTable]:
        """The tables that hold the blocks of loads."""
        return (load.table for load in self._loads.values())

    def sequences(self) -> list[Sequence]:
        """Sequences that wait for a load."""
        return [
            sequence
            for load in self._loads.values()
            for sequence in load.sequences
            if sequence.status is SequenceStatus.loading
        ]

    def begin(self, sequence: Sequence, match: PrefixMatch, num_spare: int) -> BlockTransfer | None:
        """Let a waiting sequence wait for the blocks that `match` names in the tier.

        The sequence's status becomes `loading`. If another load already fetches the same blocks,
        the sequence waits for that load. Nothing happens if too few blocks are free, if computing
        is predicted to be faster, if the sequence has loaded these blocks before, or while a load
        takes too long.

        A long prefix takes several loads, one after the other. So loads of other sequences come
        between them, and a running sequence that needs a block does not wait for a long load.

        Args:
            sequence: a waiting sequence. The caller removes it from the queue if its status is
                `loading` afterwards.
            match: its prefix match, with some blocks in the tier.
            num_spare: free blocks that must be left for other sequences.

        Returns:
            The transfer to make, if a new load was started.
        """
        cache, table = self._cache, sequence.block_table
        first_hash = table.hashes[len(match.block_ids)]
        load = self._by_hash.get(first_hash)
        if load is not None:
            load.sequences.append(sequence)
            sequence.status = SequenceStatus.loading
            return None
        if any(load.is_abandoned for load in self._loads.values()):
            return None  # the next load would wait for it
        tiers, num_found = cache.tiers, len(match.block_ids)
        assert tiers is not None, "the match has places in a tier"
        match = match._replace(places=match.places[: tiers.costs.most_blocks])
        end = num_found + len(match.places)
        num_tokens = end * cache.block_size
        if end <= sequence.num_loaded_blocks or (
            cache.num_missing_blocks(num_tokens, match) + num_spare > cache.num_free_blocks
        ):
            return None
        num_ahead = sum(len(load.transfer.places) for load in self._loads.values())
        start = num_found * cache.block_size
        if not tiers.costs.is_faster(len(match.places), start, num_ahead):
            return None
        # Hold the places first, because allocating blocks can overwrite places.
        tiers.hold(match.places)
        blocks = table.fork()
        copies = cache.admit(blocks, match, num_tokens)
        assert copies == [], "blocks that were counted free cannot be allocated"
        self._num_begun += 1
        transfer = BlockTransfer(
            self._num_begun,
            True,
            blocks.block_ids[num_found:],
            match.places,
            [*table.hashes[num_found:end]],
        )
        load = _Load(transfer, blocks, sequence)
        self._loads[transfer.transfer_id] = self._by_hash[first_hash] = load
        sequence.num_loaded_blocks = end
        sequence.status = SequenceStatus.loading
        return transfer

    def finish(self, transfer_id: int, num_blocks: int) -> list[Sequence]:
        """End a load. Its first `num_blocks` blocks were loaded; the others failed.

        Returns:
            The unfinished sequences that waited for it. The caller queues them again.

        Raises:
            KeyError: there is no such load.
        """
        cache = self._cache
        load = self._loads.pop(transfer_id)
        self._by_hash = {key: one for key, one in self._by_hash.items() if one is not load}
        num_matched = len(load.table.block_ids) - len(load.transfer.block_ids)
        num_tokens = (num_matched + num_blocks) * cache.block_size
        cache.register(load.table, load.token_ids, num_tokens)
        cache.free(load.table)
        assert cache.tiers is not None, "loads come from a tier"
        cache.tiers.release(load.transfer.places, num_blocks)
        return self._take_waiting(load)

    def abandon(self, transfer_id: int) -> list[Sequence]:
        """Let no sequence wait for a load any more, because it takes too long.

        Its blocks stay allocated until `finish`, because the load can still write to them.

        Returns:
            The unfinished sequences that waited for it. The caller queues them again.

        Raises:
            KeyError: there is no such load.
        """
        load = self._loads[transfer_id]
        load.is_abandoned = True
        self._by_hash = {key: one for key, one in self._by_hash.items() if one is not load}
        return self._take_waiting(load)

    def transfers_of(self, step: StepPlan, *, can_go_alone: bool) -> list[BlockTransfer]:
        """All transfers that a planned step makes before it writes: stores, then its loads.

        Args:
            step: the step.
            can_go_alone: no step is in flight. A rank makes the transfers of a step without entries
                at once, and a rank of a pipeline may not have run the steps in flight yet. So
                transfers wait if there is neither an entry nor this permission.
        """
        assert self._cache.tiers is not None, "there are transfers only with tiers"
        self._waiting += step.transfers
        if not (step.scheduled or can_go_alone):
            return []  # stores wait in the index, so that it knows that they are not made yet
        loads, self._waiting = self._waiting, []
        # Stores come first, because a load can overwrite a block that is to be stored.
        return [*self._cache.tiers.take_stores(), *loads]

    @staticmethod
    def _take_waiting(load: _Load) -> list[Sequence]:
        sequences, load.sequences = load.sequences, []
        return [one for one in sequences if one.status is SequenceStatus.loading]
