"""The KV cache manager: fills the block tables of sequences and finds cached prefixes.

Lookups find a block as soon as the step that fills it is scheduled. The attention op writes all
keys and values of a step before any row attends, so sequences of the same step can share the block
too. Therefore every scheduled step must be executed. If a scheduled step was not executed, the
cache must be reset.

The manager takes token ids and counts as plain arguments and keeps no record of sequences. Only the
scheduler keeps the number of computed tokens of each sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.kv.block_pool import BlockPool, hash_blocks, hash_root
from ostinato.runtime.kv.block_table import BlockTable, media_extras
from ostinato.runtime.kv.tier_index import TierIndex
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.images import PromptImage

__all__ = ("KVCacheManager", "PrefixMatch")


class PrefixMatch(NamedTuple):
    """The longest known prefix of a sequence, in whole blocks.

    Attributes:
        block_ids: device blocks that hold the first tokens.
        places: places in the slower tiers that hold the blocks after these.
    """

    block_ids: list[int]
    places: list[int] = []  # noqa: RUF012 - never changed


class KVCacheManager:
    """Block tables over a `BlockPool`, with prefix caching.

    Args:
        total_blocks: blocks in the cache tensors; block 0 is the null block, the others are used.
        block_size: tokens per block.
        enable_prefix_caching: whether full blocks are shared between sequences with equal prefixes.
        tiers: slower memories with copies of blocks; None = no such memory.

    Attributes:
        prefix_queries: prompt tokens that were looked up at a sequence's first admission.
        prefix_hits: tokens of these lookups that were found.

    Raises:
        ValueError: there are fewer than 2 blocks, or a block has no token.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        tiers: TierIndex | None = None,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
        step_tokens: int | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"cache.block_size must be at least 1 token, got {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.tiers = tiers
        self._pool = BlockPool(total_blocks, on_evict=None if tiers is None else tiers.on_evict)

    @property
    def num_blocks(self) -> int:
        """Usable blocks, the null block excluded."""
        return self._pool.num_blocks

    @property
    def highest_block_id(self) -> int:
        """The highest id that was ever allocated. No sequence has written to blocks beyond it."""
        return self._pool.highest_block_id

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated. Cached blocks that no table holds count as free."""
        return self._pool.num_free

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were reused for other contents, since the start."""
        return self._pool.num_evictions

    def block_kinds(self) -> bytes:
        """The state of each usable block; see `BlockPool.kinds`. O(blocks)."""
        return self._pool.kinds()

    def new_table(
        self,
        num_prompt_tokens: int,
        cache_salt: str = "",
        extra_keys: Sequence[str] = (),
        media: Sequence[PromptImage | PromptSound] = (),
    ) -> BlockTable:
        """The empty block table of a sequence; see `hash_root` for the keys."""
        extras = media_extras(media, self.block_size) if media else None
        table = BlockTable(hash_root(cache_salt, extra_keys), extras)
        if self.tiers is not None:
            table.num_kept = self.tiers.num_kept_blocks(
                num_prompt_tokens, self.block_size, is_salted=bool(cache_salt)
            )
        return table

    def match_prefix(
        self, table: BlockTable, token_ids: Sequence[int], max_tokens: int
    ) -> PrefixMatch:
        """Find the longest known prefix of a sequence. No block is taken.

        Args:
            table: the sequence's empty block table.
            token_ids: the sequence's known tokens.
            max_tokens: leading tokens that may come from the cache.
        """
        block_ids: list[int] = []
        places: list[int] = []
        if self.enable_prefix_caching:
            num_blocks = max_tokens // self.block_size
            self._hash_up_to(table, token_ids, num_blocks)
            get_cached = self._pool.get_cached
            for block_hash in islice(table.hashes, num_blocks):
                block_id = get_cached(block_hash)
                if block_id is None:
                    break
                block_ids.append(block_id)
            if self.tiers is not None:
                for block_hash in islice(table.hashes, len(block_ids), num_blocks):
                    place = self.tiers.find(block_hash)
                    if place is None:
                        break
                    places.append(place)
        return PrefixMatch(block_ids, places)

    def num_missing_blocks(self, num_tokens: int, match: PrefixMatch) -> int:
        """Free blocks that a sequence of `num_tokens` tokens with this prefix match needs."""
        in_free_list = self._pool.num_unheld(match.block_ids)
        return -(-num_tokens // self.block_size) - len(match.block_ids) + in_free_list

    def admit(self, table: BlockTable, match: PrefixMatch, num_tokens: int) -> bool:
        """Fill an empty table for `num_tokens` tokens, beginning with the matched blocks.

        All blocks of a prompt are taken at once, even if its first chunk is small. So an admitted
        sequence has enough blocks until its first output token.

        Args:
            table: holds no blocks yet.
            match: the result of `match_prefix` for this table.
            num_tokens: the sequence's known tokens.

        Returns:
            False if too few blocks are free; then nothing is changed.
        """
        assert not table.block_ids, f"{table!r} is admitted while it holds blocks"
        if self.num_missing_blocks(num_tokens, match) > self._pool.num_free:
            return False
        self._pool.touch(match.block_ids)
        table.block_ids = match.block_ids[:]
        taken = self.allocate(table, num_tokens)
        assert taken is not None, "blocks that were counted free cannot be allocated"
        table.num_registered = len(match.block_ids)
        if self.tiers is not None and table.num_kept is not None:
            self.tiers.on_hit(match.block_ids[: table.num_kept], table.hashes)
        return True

    def count_lookup(self, num_tokens: int, num_found: int) -> None:
        """Count a prefix lookup of `num_tokens` prompt tokens; `num_found` of them were cached."""
        if self.enable_prefix_caching:
            self.prefix_queries += num_tokens
            self.prefix_hits += num_found

    def allocate(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Extend a table so that it holds positions [0, num_tokens).

        Returns:
            The appended block ids. None if too few blocks are free; then nothing is changed.
        """
        missing = -(-num_tokens // self.block_size) - len(table.block_ids)
        block_ids = self._pool.allocate(max(missing, 0))
        if block_ids:
            table.block_ids += block_ids
        return block_ids

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        """Let a sequence with the same tokens share all blocks, also a partly filled last block.

        Before one of the two sequences writes to the last block, `make_writable` gives it a copy.
        """
        assert not child.block_ids, f"{child!r} is forked while it holds blocks"
        self._pool.touch(parent.block_ids)
        child.block_ids = parent.block_ids[:]
        child.num_registered = parent.num_registered

    def make_writable(self, table: BlockTable, position: int) -> list[tuple[int, int]] | None:
        """Make sure that only this table holds the block of `position`, which is computed next.

        Returns:
            At most one copy (from, to), which must be made before the step writes. None if a block
            is needed and no block is free; then nothing is changed.
        """
        index, offset = divmod(position, self.block_size)
        ids = table.block_ids
        if index < len(ids) and self._pool.ref_count(ids[index]) == 1:
            return []
        block_ids = self._pool.allocate(1)
        if block_ids is None:
            return None
        if index == len(ids):
            ids += block_ids
            return []
        shared, ids[index] = ids[index], block_ids[0]
        self._pool.free([shared])
        return [(shared, block_ids[0])] if offset else []

    def register(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Let lookups find a table's full blocks.

        Args:
            table: the sequence's table.
            token_ids: the sequence's known tokens.
            num_computed: how many positions are computed, or will be by a scheduled step. Positions
                beyond the known tokens are ignored, because their token has not arrived.
        """
        if not self.enable_prefix_caching:
            return
        num_full_blocks = min(num_computed, len(token_ids)) // self.block_size
        self._hash_up_to(table, token_ids, num_full_blocks)
        for index in range(table.num_registered, num_full_blocks):
            block_id, block_hash = table.block_ids[index], table.hashes[index]
            is_new = self._pool.register(block_id, block_hash)
            if is_new and index < (table.num_kept or 0) and self.tiers is not None:
                self.tiers.on_register(block_id, block_hash)
        table.num_registered = max(table.num_registered, num_full_blocks)

    def note_preemption(self, table: BlockTable) -> None:
        """Let the computed blocks of a table be copied, because its sequence will need them again.

        Blocks of outputs are copied too.
        """
        if self.tiers is None or table.num_kept is None:
            return
        for block_hash in reversed(table.hashes[: table.num_registered]):
            # A block of the table with the same contents as an earlier one has no hash. Its
            # contents can change without a call of `on_evict`.
            block_id = self._pool.get_cached(block_hash)
            if block_id is not None:
                self.tiers.on_preempt(block_id, block_hash)

    def free(self, table: BlockTable) -> None:
        """Free all blocks of a table. Lookups find their contents until the blocks are reused."""
        self._pool.free(table.block_ids)
        table.block_ids = []
        table.num_registered = 0

    def num_reclaimable_blocks(self, table: BlockTable, kept: Collection[int] = ()) -> int:
        """Blocks that become free when this table frees its blocks, without those `kept`."""
        ids = table.block_ids
        if kept:
            ids = list(set(ids).difference(kept))
        return self._pool.num_held_once(ids)

    def reset(self) -> bool:
        """Forget all cached contents. While a table holds blocks: change nothing, return False."""
        if self._pool.num_free != self._pool.num_blocks:
            return False
        self._pool.forget_cached()
        if self.tiers is not None:
            self.tiers.clear()
        return True

    def check_integrity(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Check the pool. If all tables that hold blocks are given, compare references with them.

        Raises:
            AssertionError: the records contradict each other; the text names the block.
        """
        self._pool.check_integrity()
        if tables is None:
            return
        counts: dict[int, int] = {}
        for table in tables:
            for block_id in table.block_ids:
                counts[block_id] = counts.get(block_id, 0) + 1
        for block_id in range(self.num_blocks + 1):
            held, listed = self._pool.ref_count(block_id), counts.get(block_id, 0)
            if held != listed:
                raise AssertionError(
                    f"KV cache: block {block_id} has {held} references and is in {listed} tables"
                )

    def _hash_up_to(self, table: BlockTable, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hash the first `num_blocks` blocks of a table, if they are not hashed yet."""
        hashes, size = table.hashes, self.block_size
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else table.root
            extras = None
            if table.extras:
                extras = [table.extras.get(i, b"") for i in range(len(hashes), num_blocks)]
            hashes += hash_blocks(
                parent, token_ids[len(hashes) * size : num_blocks * size], size, extras
            )
