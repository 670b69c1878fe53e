"""The KV cache manager: fills the block tables of sequences and finds cached prefixes.

Lookups find a block as soon as the step that fills it is scheduled. The attention op writes all
keys and values of a step before any row attends, so sequences of the same step can share the block
too. Therefore every scheduled step must be executed. If a scheduled step was not executed, the
cache must be reset. States of recurrent layers are found one step later (state_slots.py).

The manager takes token ids and counts as plain arguments and keeps no record of sequences. Only the
scheduler keeps the number of computed tokens of each sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from ostinato.models.kv_groups import (
    REPEATED_TOKENS,
    WHOLE_CACHE,
    KVGroup,
    longest_sequence,
    sequence_blocks,
)
from ostinato.runtime.kv.block_pool import NULL_BLOCK_ID, BlockPool, hash_root
from ostinato.runtime.kv.block_table import (
    BlockTable,
    GroupBlocks,
    SequenceStates,
    media_extras,
)
from ostinato.runtime.kv.prefix_index import UNLIMITED, PrefixIndex, PrefixMatch, first_read
from ostinato.runtime.kv.state_slots import StateSlots
from ostinato.runtime.kv.tier_index import TierIndex
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.images import PromptImage

__all__ = ("KVCacheManager", "NewBlocks")


class NewBlocks(NamedTuple):
    """Ids that were appended to the tables of a sequence, one list for each group."""

    block_ids: list[int]
    window_block_ids: list[int] = []  # noqa: RUF012 - never changed


class KVCacheManager:
    """Block tables over a `BlockPool` and slots for states, with prefix caching.

    Args:
        total_blocks: blocks in the cache tensors; block 0 is the null block, the others are used.
        block_size: tokens of a unit.
        enable_prefix_caching: whether blocks are shared between sequences with equal prefixes.
        tiers: slower memories with copies of blocks; None = no such memory. With tiers, there is
            one group without a window.
        groups: the groups of layers that have blocks of their own.
        step_tokens: tokens of the largest step; None = any number. Only groups with a window need
            it: a prompt has blocks for its next step only.
        num_states: slots for the states of recurrent layers, slot 0 included; 0 = no layer is
            recurrent. With states, there are no tiers.

    Attributes:
        prefix_queries: prompt tokens that were looked up at a sequence's first admission.
        prefix_hits: tokens of these lookups that were found.
        states: the slots for states of recurrent layers; None = no layer is recurrent.

    Raises:
        ValueError: there are fewer than 2 blocks, a block has no token, or there is one slot.
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
        num_states: int = 0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"cache.block_size must be at least 1 token, got {block_size}")
        assert tiers is None or groups == WHOLE_CACHE, "tiers store blocks of one group"
        assert tiers is None or not num_states, "tiers store no states"
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.tiers = tiers
        self.groups = groups
        self.has_windows = any(group.window for group in groups)
        self._sizes = [group.units * block_size for group in groups]  # tokens of a block
        self._step_tokens = UNLIMITED if step_tokens is None else step_tokens
        self._pool = BlockPool(total_blocks, on_evict=None if tiers is None else tiers.on_evict)
        self.states = StateSlots(num_states, block_size) if num_states else None
        self._index = PrefixIndex(
            self._pool, groups, block_size, step_tokens=self._step_tokens, states=self.states
        )

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

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that all blocks together have room for."""
        return longest_sequence(self.groups, self.block_size, self.num_blocks, self._step_tokens)

    def sequence_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens holds at once."""
        return sequence_blocks(self.groups, self.block_size, num_tokens, self._step_tokens)

    def block_kinds(self) -> bytes:
        """The state of each usable block; see `BlockPool.kinds`. O(blocks)."""
        return self._pool.kinds()

    def begin_step(self) -> None:
        """Note that a step is planned, after all steps before it."""
        self._index.begin_step()
        if self.states is not None:
            self.states.begin_step()

    def new_table(
        self,
        num_prompt_tokens: int,
        cache_salt: str = "",
        extra_keys: Sequence[str] = (),
        media: Sequence[PromptImage | PromptSound] = (),
    ) -> BlockTable:
        """The empty block table of a sequence; see `hash_root` for the keys."""
        extras = media_extras(media, self.block_size) if media else None
        table = BlockTable(hash_root(cache_salt, extra_keys), extras, len(self.groups))
        if self.tiers is not None:
            table.num_kept = self.tiers.num_kept_blocks(
                num_prompt_tokens, self.block_size, is_salted=bool(cache_salt)
            )
        if self.states is not None:
            table.states = SequenceStates(num_prompt_tokens)
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
        if not self.enable_prefix_caching:
            return PrefixMatch(0, [GroupBlocks() for _ in self.groups])
        num_units = max_tokens // self.block_size
        table.hash_up_to(token_ids, num_units, self.block_size)
        match = self._index.find(table.hashes, num_units)
        if self.tiers is None:
            return match
        places: list[int] = []
        for block_hash in islice(table.hashes, len(match.block_ids), num_units):
            place = self.tiers.find(block_hash)
            if place is None:
                break
            places.append(place)
        return match._replace(places=places)

    def num_missing_blocks(self, num_tokens: int, match: PrefixMatch) -> int:
        """Free blocks that a sequence of `num_tokens` tokens with this prefix match needs."""
        return self._index.num_missing(match, num_tokens)

    def admit(
        self, table: BlockTable, match: PrefixMatch, num_tokens: int
    ) -> list[tuple[int, int]] | None:
        """Fill an empty table for `num_tokens` tokens, beginning with the matched blocks.

        All blocks of a prompt are taken at once, even if its first chunk is small. So an admitted
        sequence has enough blocks until its first output token. In groups with a window these are
        the most that it holds at once, because each later step frees as many as it needs.

        Args:
            table: holds no blocks yet.
            match: the result of `match_prefix` for this table.
            num_tokens: the sequence's known tokens.

        Returns:
            Copies (from, to), which must be made before the next step writes. None if too few
            blocks or no slot for states is free; then nothing is changed.
        """
        assert table.is_empty, f"{table!r} is admitted while it holds blocks"
        if self.num_missing_blocks(num_tokens, match) > self._pool.num_free:
            return None
        if self.states is not None:
            if not self.states.num_free:
                return None
            self.states.admit(table, match.state_slot, match.branch)
        indices = range(len(self.groups))
        num_new = [self._index.num_new(index, match, num_tokens) for index in indices]
        in_part: list[tuple[int, int, int]] = []  # group, entry of its table, block to copy
        for index, (blocks, matched) in enumerate(zip(table.groups, match.groups, strict=True)):
            whole = self._index.num_whole(index, match)
            blocks.ids, blocks.num_freed = matched.ids[:whole], matched.num_freed
            self._pool.touch(blocks.held())
            in_part += [(index, whole, block_id) for block_id in matched.ids[whole:]]
        for blocks, count in zip(table.groups, num_new, strict=True):
            taken = self._pool.allocate(count)
            assert taken is not None, "blocks that were counted free cannot be allocated"
            blocks.ids += taken
        table.num_registered = match.num_tokens // self.block_size
        if self.tiers is not None and table.num_kept is not None:
            self.tiers.on_hit(match.block_ids[: table.num_kept], table.hashes)
        for _, _, source in in_part:
            self._pool.renew(source)
        copies = [(source, table.groups[index].ids[at]) for index, at, source in in_part]
        return [(source, target) for source, target in copies if source != target]

    def count_lookup(self, num_tokens: int, num_found: int) -> None:
        """Count a prefix lookup of `num_tokens` prompt tokens; `num_found` of them were cached."""
        if self.enable_prefix_caching:
            self.prefix_queries += num_tokens
            self.prefix_hits += num_found

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that a table lacks for positions [0, num_tokens)."""
        return sum(self._missing(table, num_tokens))

    def _missing(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Blocks that each group of a table lacks for positions [0, num_tokens)."""
        pairs = zip(self._sizes, table.groups, strict=True)
        return [max(0, -(-num_tokens // size) - len(blocks.ids)) for size, blocks in pairs]

    def num_tokens(self, table: BlockTable) -> int:
        """Positions that a table has blocks for, counted from the first."""
        pairs = zip(self._sizes, table.groups, strict=True)
        return min(size * len(blocks.ids) for size, blocks in pairs)

    def allocate(self, table: BlockTable, num_tokens: int, start: int) -> NewBlocks | None:
        """Extend a table so that it holds positions [0, num_tokens).

        Blocks that lie outside of their group's window are freed before.

        Args:
            table: the sequence's table.
            num_tokens: positions that the table has blocks for afterwards, at least.
            start: the first position that the step computes.

        Returns:
            The appended block ids. None if too few blocks are free; then no block is appended.
        """
        if self.has_windows:
            self._free_behind(table, start)
        if len(table.groups) == 1:
            ids = table.groups[0].ids
            missing = -(-num_tokens // self._sizes[0]) - len(ids)
            block_ids = self._pool.allocate(missing) if missing > 0 else []
            if block_ids is None:
                return None
            ids += block_ids
            return NewBlocks(block_ids)
        counts = self._missing(table, num_tokens)
        if sum(counts) > self._pool.num_free:
            return None
        appended: list[list[int]] = []
        for count, blocks in zip(counts, table.groups, strict=True):
            taken = self._pool.allocate(count)
            assert taken is not None, "blocks that were counted free cannot be allocated"
            blocks.ids += taken
            appended.append(taken)
        return NewBlocks(*appended)

    def _free_behind(self, table: BlockTable, start: int) -> None:
        """Free the blocks that no token from `start` on reads, even if steps are repeated."""
        for group, size, blocks in zip(self.groups, self._sizes, table.groups, strict=True):
            if group.window:
                end = first_read(group.window, start - REPEATED_TOKENS) // size
                if end > blocks.num_freed:
                    self._pool.free(blocks.ids[blocks.num_freed : end])
                    blocks.ids[blocks.num_freed : end] = [NULL_BLOCK_ID] * (end - blocks.num_freed)
                    blocks.num_freed = end

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        """Let a sequence with the same tokens share all blocks, also a partly filled last block.

        Before one of the two sequences writes to the last block, `make_writable` gives it a copy.
        """
        assert child.is_empty, f"{child!r} is forked while it holds blocks"
        self._pool.touch(parent.held())
        child.groups = [GroupBlocks(one.ids[:], one.num_freed) for one in parent.groups]
        child.num_registered = parent.num_registered
        if self.states is not None:
            self.states.fork(parent, child)

    def rewind_states(self, table: BlockTable, token_ids: Sequence[int]) -> int | None:
        """Go back to kept states before the last known token, because it must be computed again.

        The tokens after these states are computed again too, into the same blocks. So no block of
        theirs may be in another table. With a window, they are at most `REPEATED_TOKENS`.

        Returns:
            The position that the next step begins with. None if there is none; then the sequence
            must be preempted.
        """
        assert self.states is not None, "there are recurrent layers"
        least = 0
        for group, size, blocks in zip(self.groups, self._sizes, table.groups, strict=True):
            index = len(blocks.ids)
            while index > blocks.num_freed and self._pool.ref_count(blocks.ids[index - 1]) == 1:
                index -= 1
            least = max(least, index * size)
            if group.window:
                least = max(least, len(token_ids) - REPEATED_TOKENS)
            if blocks.num_freed:
                least = max(least, blocks.num_freed * size + group.window - 1)
        return self.states.rewind(table, token_ids, least)

    def make_writable(self, table: BlockTable, position: int) -> list[tuple[int, int]] | None:
        """Make sure that only this table holds the blocks of `position`, which is computed next.

        Returns:
            Copies (from, to), at most one for each group, which must be made before the step
            writes. None if a block is needed and too few blocks are free; then nothing is changed.
        """
        wanted: list[tuple[list[int], int, int]] = []  # ids of a group, index and offset
        for size, blocks in zip(self._sizes, table.groups, strict=True):
            index, offset = divmod(position, size)
            if index == len(blocks.ids) or self._pool.ref_count(blocks.ids[index]) > 1:
                wanted.append((blocks.ids, index, offset))
        taken = self._pool.allocate(len(wanted))
        if taken is None:
            return None
        copies: list[tuple[int, int]] = []
        for (ids, index, offset), block_id in zip(wanted, taken, strict=True):
            if index == len(ids):
                ids.append(block_id)
                continue
            shared, ids[index] = ids[index], block_id
            self._pool.free([shared])
            if offset:
                copies.append((shared, block_id))
        return copies

    def register(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Let lookups find a table's full units.

        Args:
            table: the sequence's table.
            token_ids: the sequence's known tokens.
            num_computed: how many positions are computed, or will be by a scheduled step. Positions
                beyond the known tokens are ignored, because their token has not arrived.
        """
        if self.states is not None:
            self.states.settle(table, token_ids)
        if not self.enable_prefix_caching:
            return
        num_full = min(num_computed, len(token_ids)) // self.block_size
        if num_full <= table.num_registered:
            return
        table.hash_up_to(token_ids, num_full, self.block_size)
        new_blocks = self._index.register(table, num_full)
        if self.tiers is not None:
            for index, block_id, block_hash in new_blocks:
                if index < (table.num_kept or 0):
                    self.tiers.on_register(block_id, block_hash)

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
        for blocks in table.groups:
            self._pool.free(blocks.held())
            blocks.ids, blocks.num_freed = [], 0
        table.num_registered = 0
        if self.states is not None:
            self.states.release(table)

    def num_reclaimable_blocks(self, table: BlockTable, kept: Collection[int] = ()) -> int:
        """Blocks that become free when this table frees its blocks, without those `kept`."""
        ids = table.held()
        if kept:
            ids = list(set(ids).difference(kept))
        return self._pool.num_held_once(ids)

    def reset(self) -> bool:
        """Forget all cached contents. While a table holds blocks: change nothing, return False."""
        if self._pool.num_free != self._pool.num_blocks:
            return False
        if self.states is not None and not self.states.reset():
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
        tables = None if tables is None else list(tables)
        if self.states is not None:
            self.states.check_integrity(tables)
        self._pool.check_integrity()
        if tables is None:
            return
        counts = Counter[int]()
        for table in tables:
            table.check_shape(self.groups)
            counts.update(table.held())
        self._pool.check_references(counts, "KV cache: block")
