"""`PrefixIndex`: finds the cached blocks that hold a prefix, and counts those that are missing.

Prefixes are found in units of `cache.block_size` tokens. A unit's hash names all tokens up to its
end. A block of a group can hold several units (`KVGroup`). Then each unit's hash finds the block.
If a prefix ends within such a block, a sequence with this prefix gets a copy of the block.

In a group with a window, a prefix needs only the blocks that the token after it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup, sequence_blocks
from ostinato.runtime.kv.block_pool import NULL_BLOCK_ID, BlockHash, BlockPool
from ostinato.runtime.kv.block_table import BlockTable, GroupBlocks
from ostinato.runtime.kv.state_slots import StateSlots

__all__ = ("UNLIMITED", "PrefixIndex", "PrefixMatch", "first_read")

UNLIMITED = 1 << 60  # tokens; more than any sequence or step has


def first_read(window: int, position: int) -> int:
    """The first position that the token at `position` reads in a layer with this window."""
    return max(0, position - window + 1)


class PrefixMatch(NamedTuple):
    """The longest known prefix of a sequence.

    Attributes:
        num_tokens: tokens that the device has. They are whole units.
        groups: for each group, the blocks that hold the first tokens, so far as later tokens read
            them. If the last block of a group is needed in part, it is copied.
        places: places in the slower tiers that hold the blocks after these.
        state_slot: the slot with the states after these tokens; 0 = states begin with zeros, or
            no layer is recurrent.
        branch: tokens whose blocks were found, if states were found for fewer tokens only; else 0.
        has_fresh_state: the step that is being planned writes the states after a longer prefix. A
            later step can read them.
    """

    num_tokens: int
    groups: list[GroupBlocks]
    places: list[int] = []  # noqa: RUF012 - never changed
    state_slot: int = 0
    branch: int = 0
    has_fresh_state: bool = False

    @property
    def block_ids(self) -> list[int]:
        """The ids of the first group."""
        return self.groups[0].ids

    def held(self) -> list[int]:
        """All blocks of the match."""
        return [block_id for group in self.groups for block_id in group.held()]


class PrefixIndex:
    """The cached blocks of a pool, by the hashes of their units.

    Args:
        pool: the block pool.
        groups: the groups of layers that have blocks of their own.
        block_size: tokens of a unit.
        step_tokens: tokens of the largest step.
        states: the slots for states of recurrent layers; None = no layer is recurrent.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: tuple[KVGroup, ...],
        block_size: int,
        *,
        step_tokens: int,
        states: StateSlots | None = None,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._block_size = block_size
        self._sizes = [group.units * block_size for group in groups]  # tokens of a block
        self._step_tokens = step_tokens
        self._states = states
        # Blocks with several units to which the step being planned adds one. They cannot be copied
        # in this step, because copies are made before the step writes.
        self._fresh: set[int] = set()

    def begin_step(self) -> None:
        """Note that a step is planned, after all steps before it."""
        self._fresh.clear()

    def find(self, hashes: Sequence[BlockHash], num_units: int) -> PrefixMatch:
        """The longest prefix whose blocks are cached, and with recurrent layers its states too.

        Args:
            hashes: [num_units] or more, of a sequence's units.
            num_units: units that may be found.
        """
        size, (units, groups) = self._block_size, self._find_blocks(hashes, num_units)
        if self._states is None:
            return PrefixMatch(units * size, groups)
        longest, found = units, self._states.find(hashes, units)
        has_fresh = found.has_fresh
        while found.num_units < units:
            units, groups = self._find_blocks(hashes, found.num_units)
            found = self._states.find(hashes, units)
        branch = longest * size if units < longest else 0
        return PrefixMatch(units * size, groups, [], found.slot, branch, has_fresh)

    def num_missing(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks that a sequence of `num_tokens` tokens with this prefix match needs.

        Blocks of a window that another sequence holds come on top, because the other sequence can
        hold them for longer.
        """
        missing = 0
        for index in range(len(self._groups)):
            missing += self.num_new(index, match, num_tokens)
            missing += self._pool.num_unheld(self._shared(index, match))
        return missing

    def num_whole(self, index: int, match: PrefixMatch) -> int:
        """Blocks of a group's match, without a last block that is needed in part."""
        return match.num_tokens // self._sizes[index]

    def num_new(self, index: int, match: PrefixMatch, num_tokens: int) -> int:
        """Blocks of a group that a sequence with this match gets at its admission, besides them.

        In a group with a window these are the most that it holds at once, without the shared blocks
        that become its own. So its next steps need no further block.
        """
        size, whole = self._sizes[index], self.num_whole(index, match)
        count = -(-num_tokens // size) - whole
        if self._groups[index].window:
            first = -(-(match.num_tokens + self._step_tokens) // size) - whole
            most = sequence_blocks(
                self._groups[index : index + 1], self._block_size, UNLIMITED, self._step_tokens
            )
            own = self._pool.num_unheld(self._shared(index, match))
            count = min(count, max(first, most - own))
        return count

    def _shared(self, index: int, match: PrefixMatch) -> list[int]:
        """The blocks of a group's match that the sequence takes without a copy."""
        blocks = match.groups[index]
        return blocks.ids[blocks.num_freed : self.num_whole(index, match)]

    def register(self, table: BlockTable, num_units: int) -> list[tuple[int, int, BlockHash]]:
        """Let lookups find the first units of a table.

        Args:
            table: has hashes and blocks for these units.
            num_units: units that are computed, or will be by a scheduled step.

        Returns:
            (index in the table, block id, hash) of each block that lookups found before by no other
            block.
        """
        new_blocks: list[tuple[int, int, BlockHash]] = []
        units = range(table.num_registered, num_units)
        table.num_registered = max(table.num_registered, num_units)
        if self._groups == WHOLE_CACHE:  # the general case takes twice as long
            block_ids, hashes, register = table.block_ids, table.hashes, self._pool.register
            for unit in units:
                if register(block_ids[unit], hashes[unit]):
                    new_blocks.append((unit, block_ids[unit], hashes[unit]))
            return new_blocks
        for index, (group, blocks) in enumerate(zip(self._groups, table.groups, strict=True)):
            for unit in units:
                at, block_hash = unit // group.units, table.hashes[unit]
                block_id = blocks.ids[at]
                if block_id == NULL_BLOCK_ID:
                    continue
                if self._pool.register(block_id, _key(index, block_hash)):
                    new_blocks.append((at, block_id, block_hash))
                if group.units > 1:
                    self._fresh.add(block_id)
        return new_blocks

    def _find_blocks(
        self, hashes: Sequence[BlockHash], num_units: int
    ) -> tuple[int, list[GroupBlocks]]:
        """The longest prefix whose blocks are cached.

        Returns:
            The number of units, at most `num_units`, and for each group the blocks that hold them.
            In a group with a window the first blocks are null blocks.
        """
        get_cached = self._pool.get_cached
        if self._groups == WHOLE_CACHE:
            block_ids: list[int] = []
            for index in range(num_units):
                block_id = get_cached(hashes[index])
                if block_id is None:
                    break
                block_ids.append(block_id)
            return len(block_ids), [GroupBlocks(block_ids)]
        found = num_units
        indices = range(len(self._groups))
        for index in indices:
            if not self._groups[index].window:
                found = self._longest(index, hashes, found)
        while (least := min(self._usable(index, hashes, found) for index in indices)) < found:
            found = least
        return found, [self._blocks(index, hashes, found) for index in indices]

    def _get(self, index: int, block_hash: BlockHash) -> int | None:
        return self._pool.get_cached(_key(index, block_hash))

    def _holder(
        self, index: int, hashes: Sequence[BlockHash], unit: int, *, is_copied: bool = False
    ) -> int | None:
        """A block with a unit and all units before it that are in the same block; None = no block.

        A unit's hash names all tokens before it. So a block that is found by the hash of a later
        unit has these units too, even if their hashes find another block, or none any more.
        """
        units = self._groups[index].units
        end = min(unit // units * units + units, len(hashes))
        for later in range(end - 1, unit - 1, -1):
            block_id = self._get(index, hashes[later])
            if block_id is not None and not (is_copied and block_id in self._fresh):
                return block_id
        return None

    def _longest(self, index: int, hashes: Sequence[BlockHash], most: int) -> int:
        """The first units, at most `most`, that a group without a window has all blocks for."""
        units = self._groups[index].units
        for begin in range(0, most, units):
            end = min(begin + units, most)
            while end > begin and self._holder(index, hashes, end - 1) is None:
                end -= 1
            if end < min(begin + units, most):
                return end
        return most

    def _usable(self, index: int, hashes: Sequence[BlockHash], num_units: int) -> int:
        """`num_units` if a group has what a prefix of this length needs. Otherwise a smaller number
        that is not below the next possible one."""
        window, units, _ = self._groups[index]
        if num_units % units and self._holder(index, hashes, num_units - 1, is_copied=True) is None:
            return num_units - 1
        if window:
            # The last unit is always taken, because the block that it is in is filled further.
            first = first_read(max(window, 2), num_units * self._block_size) // self._block_size
            unit = num_units - 1
            while unit >= first:
                if self._holder(index, hashes, unit) is None:
                    return unit
                unit = unit // units * units - 1  # the last unit of the block before
        return num_units

    def _blocks(self, index: int, hashes: Sequence[BlockHash], num_units: int) -> GroupBlocks:
        """The blocks of a group that hold the first units."""
        window, units, _ = self._groups[index]
        num_freed = 0
        if window:
            first = first_read(window, num_units * self._block_size)
            num_freed = first // (units * self._block_size)
        blocks = GroupBlocks([NULL_BLOCK_ID] * num_freed, num_freed)
        for begin in range(num_freed * units, num_units, units):
            is_copied = begin + units > num_units
            last = min(begin + units, num_units) - 1
            block_id = self._holder(index, hashes, last, is_copied=is_copied)
            assert block_id is not None, "the units of a prefix were found"
            blocks.ids.append(block_id)
        return blocks


def _key(index: int, block_hash: BlockHash) -> BlockHash:
    """The hash of the same tokens in the group with this index."""
    return BlockHash(block_hash + b"w") if index else block_hash
