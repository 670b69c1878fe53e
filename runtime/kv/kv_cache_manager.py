"""Which blocks hold which sequence's keys and values, and which prefixes can be reused.

A block is findable as soon as the step that fills it is scheduled, because the attention op writes
all keys and values of a step before any row attends: sequences of the same or of a later step may
share it at once. So every scheduled step must be executed; when one was not, the cache is reset.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ostinato.runtime.kv.block_pool import BlockPool, hash_blocks, hash_root
from ostinato.runtime.scheduling.sequence import Sequence

__all__ = ("KVCacheManager",)


class KVCacheManager:
    """Block tables over a `BlockPool`, with prefix caching.

    Args:
        total_blocks: blocks in the cache tensors; block 0 is the null block, the others are used.
        block_size: tokens per block.
        enable_prefix_caching: whether full blocks are shared between sequences with equal prefixes.

    Raises:
        ValueError: fewer than 2 blocks, or an empty block.
    """

    def __init__(
        self, total_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        if block_size < 1:
            raise ValueError(f"cache.block_size must be at least 1 token, got {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0  # prompt tokens looked up at a sequence's first admission
        self.prefix_hits = 0  # of which were found
        self._pool = BlockPool(total_blocks)

    @property
    def num_blocks(self) -> int:
        """Usable blocks, the null block excluded."""
        return self._pool.num_blocks

    @property
    def highest_block_id(self) -> int:
        """Of the blocks that were ever handed out; blocks beyond it were never written to."""
        return self._pool.highest_block_id

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated; cached contents that nobody uses count as free."""
        return self._pool.num_free

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were reused for other contents, since the start."""
        return self._pool.num_evictions

    def block_kinds(self) -> bytes:
        """What each usable block is; see `BlockPool.kinds`. O(blocks)."""
        return self._pool.kinds()

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Find the longest known prefix of a sequence that holds no blocks. Takes nothing.

        Returns:
            Ids of the blocks with its first tokens, `max_cached_tokens` at most.
        """
        if not self.enable_prefix_caching:
            return []
        num_blocks = sequence.max_cached_tokens // self.block_size
        self._hash_up_to(sequence, num_blocks)
        get_cached = self._pool.get_cached
        block_ids: list[int] = []
        for block_hash in islice(sequence.block_hashes, num_blocks):
            block_id = get_cached(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_missing_blocks(self, num_tokens: int, cached_block_ids: list[int]) -> int:
        """Free blocks it takes to hold `num_tokens` that begin with these cached blocks."""
        in_free_list = self._pool.num_unheld(cached_block_ids)
        return -(-num_tokens // self.block_size) - len(cached_block_ids) + in_free_list

    def admit(self, sequence: Sequence, cached_block_ids: list[int]) -> bool:
        """Give a sequence blocks for all its known tokens, beginning with those of a prefix match.

        Blocks for the whole of a prompt are taken at once, whatever the size of its first chunk:
        what was admitted can not run short of memory before its first output token.

        Args:
            sequence: holds no blocks yet; its table and counts are set.
            cached_block_ids: what `match_prefix` just found.

        Returns:
            False, with nothing changed, when too few blocks are free.
        """
        assert not sequence.block_table, f"{sequence!r} is admitted while it holds blocks"
        if self.num_missing_blocks(sequence.num_tokens, cached_block_ids) > self._pool.num_free:
            return False
        self._pool.touch(cached_block_ids)
        sequence.block_table = cached_block_ids[:]
        taken = self.allocate(sequence, sequence.num_tokens)
        assert taken is not None, "blocks that were counted free can not be allocated"
        sequence.num_registered_blocks = len(cached_block_ids)
        sequence.num_computed_tokens = len(cached_block_ids) * self.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if self.enable_prefix_caching:
                self.prefix_queries += sequence.num_prompt_tokens
                self.prefix_hits += sequence.num_computed_tokens
        return True

    def allocate(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Extend the block table so that it holds positions [0, num_tokens).

        Returns:
            The appended block ids, or None with nothing changed when too few blocks are free.
        """
        missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        block_ids = self._pool.allocate(max(missing, 0))
        if block_ids:
            sequence.block_table += block_ids
        return block_ids

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence with the same tokens hold the same blocks, a partly filled one included.

        Before either writes on, `make_writable` gives it a block of its own.
        """
        assert not child.block_table, f"{child!r} is forked while it holds blocks"
        self._pool.touch(parent.block_table)
        child.block_table = parent.block_table[:]
        child.num_registered_blocks = parent.num_registered_blocks
        child.num_computed_tokens = parent.num_computed_tokens

    def make_writable(self, sequence: Sequence) -> list[tuple[int, int]] | None:
        """See to it that the next position to compute lies in a block that nobody else holds.

        Returns:
            The copy (from, to) that must be made before anything is written, if any; None with
            nothing changed when it takes a block and none is free.
        """
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        table = sequence.block_table
        if index < len(table) and self._pool.ref_count(table[index]) == 1:
            return []
        block_ids = self._pool.allocate(1)
        if block_ids is None:
            return None
        if index == len(table):
            table += block_ids
            return []
        shared, table[index] = table[index], block_ids[0]
        self._pool.free([shared])
        return [(shared, block_ids[0])] if offset else []

    def register(self, sequence: Sequence) -> None:
        """Make its full blocks findable: tokens known, and computed or in a scheduled step."""
        if not self.enable_prefix_caching:
            return
        known = min(sequence.num_computed_tokens, sequence.num_tokens)
        num_full_blocks = known // self.block_size
        self._hash_up_to(sequence, num_full_blocks)
        for index in range(sequence.num_registered_blocks, num_full_blocks):
            self._pool.register(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_registered_blocks = max(sequence.num_registered_blocks, num_full_blocks)

    def free(self, sequence: Sequence) -> None:
        """Let go of all its blocks; their contents stay findable until the blocks are reused."""
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_registered_blocks = 0
        sequence.num_computed_tokens = 0

    def num_reclaimable_blocks(self, sequence: Sequence) -> int:
        """Blocks that become free when this sequence lets go of its own."""
        return self._pool.num_held_once(sequence.block_table)

    def reset(self) -> bool:
        """Forget all cached contents; False, with nothing changed, while sequences hold blocks."""
        if self._pool.num_free != self._pool.num_blocks:
            return False
        self._pool.forget_cached()
        return True

    def check_integrity(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Check the pool and, given those who hold blocks, that tables and references agree.

        Raises:
            AssertionError: they do not; the text names the block.
        """
        self._pool.check_integrity()
        if sequences is None:
            return
        counts: dict[int, int] = {}
        for sequence in sequences:
            for block_id in sequence.block_table:
                counts[block_id] = counts.get(block_id, 0) + 1
        for block_id in range(self.num_blocks + 1):
            held, listed = self._pool.ref_count(block_id), counts.get(block_id, 0)
            if held != listed:
                raise AssertionError(
                    f"KV cache: block {block_id} has {held} references and is in {listed} tables"
                )

    def _hash_up_to(self, sequence: Sequence, num_blocks: int) -> None:
        """Hash as many leading blocks of a sequence as are not hashed yet."""
        hashes, size = sequence.block_hashes, self.block_size
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else hash_root(sequence.request.cache_salt)
            token_ids = sequence.token_ids[len(hashes) * size : num_blocks * size]
            hashes += hash_blocks(parent, token_ids, size)
