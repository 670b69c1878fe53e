"""`TierPlaces`: what the places of one slower tier hold, and which blocks wait for a copy there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.types.tier_stats import TierStats

__all__ = ("TierPlaces",)


class TierPlaces:
    """One tier. The contents that were used least recently are overwritten first.

    Args:
        first_place: the number of its first place.
        num_places: blocks that it has room for; 0 = not known yet, see `open`.

    Attributes:
        queue: blocks that wait for a copy: hash -> block id on the device.
    """

    def __init__(self, first_place: int, num_places: int = 0) -> None:
        self.stats = TierStats()
        self.queue: OrderedDict[BlockHash, int] = OrderedDict()
        # Blocks that the step being planned may fill. They wait from the next step on.
        self._fresh: dict[BlockHash, int] = {}
        self._first: list[BlockHash] = []  # blocks that are to be copied first, the last of all
        self._first_place = first_place
        self._places: OrderedDict[BlockHash, int] = OrderedDict()  # least recently used first
        self._hashes: dict[int, BlockHash] = {}
        self._free: list[int] = []  # of the first `_num_touched` places
        self._num_touched = 0
        self._takes_stores = True
        if num_places:
            self.open(num_places, ())

    def open(self, num_places: int, contents: Iterable[tuple[int, BlockHash]]) -> None:
        """Set the number of places, and what they hold.

        Args:
            num_places: blocks that the tier has room for.
            contents: (place, hash) with places counted from 0, the oldest first.
        """
        for place, block_hash in contents:
            self.remove(block_hash)  # requests can have come before
            self._put(self._first_place + place, block_hash)
        # Places behind the last used one are taken in turn, so that they need no list.
        self._num_touched = max((p + 1 - self._first_place for p in self._hashes), default=0)
        touched = range(self._first_place, self._first_place + self._num_touched)
        self._free = [place for place in touched if place not in self._hashes]
        self.stats.num_places = num_places
        self.stats.num_used_places = len(self._places)

    def find(self, block_hash: BlockHash) -> int | None:
        """The place with these contents, or None."""
        return self._places.get(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        """Note a use of these contents, if the tier has them."""
        if block_hash in self._places:
            self._places.move_to_end(block_hash)

    def add(self, block_id: int, block_hash: BlockHash, *, is_first: bool = False) -> None:
        """Let a block wait for a copy, unless the tier has one.

        Args:
            block_id: the block on the device.
            block_hash: its contents. The step that is being planned may be the one that writes
                them.
            is_first: it is copied before the blocks that wait already.
        """
        if not self._takes_stores or block_hash in self._places:
            return
        if block_hash not in self.queue:
            self._fresh[block_hash] = block_id
        if is_first:
            self._first.append(block_hash)

    def stop_stores(self) -> None:
        """Let no block wait for a copy any more."""
        self._takes_stores = False
        self._drop_waiting()

    def age(self) -> None:
        """Note that the step that was being planned is planned."""
        self.queue.update(self._fresh)
        for block_hash in self._first:
            if block_hash in self.queue:
                self.queue.move_to_end(block_hash, last=False)
        self._fresh.clear()
        self._first.clear()

    def remove(self, block_hash: BlockHash) -> bool:
        """Let a block no longer wait; returns whether it waited."""
        is_fresh = self._fresh.pop(block_hash, None) is not None
        return self.queue.pop(block_hash, None) is not None or is_fresh

    @property
    def num_waiting(self) -> int:
        """Blocks that wait for a copy."""
        return len(self.queue) + len(self._fresh)

    def take(self, block_hash: BlockHash, held: Container[int]) -> int | None:
        """A place for these contents; None if there is none, or every place is held."""
        if self._free:
            place = self._free.pop()
        elif self._num_touched < self.stats.num_places:
            place = self._first_place + self._num_touched
            self._num_touched += 1
        else:
            oldest = next((h for h, p in self._places.items() if p not in held), None)
            if oldest is None:
                return None
            place = self._places.pop(oldest)
            self.stats.num_evicted_blocks += 1
        self._put(place, block_hash)
        self.stats.num_stored_blocks += 1
        self.stats.num_used_places = len(self._places)
        return place

    def lose(self, place: int) -> bool:
        """Note that a place has no contents, because they could not be written or read.

        The caller calls `reuse` when no load holds the place.

        Returns:
            Whether the place had contents.
        """
        block_hash = self._hashes.pop(place, None)
        if block_hash is None:
            return False
        del self._places[block_hash]
        self.stats.num_failed_blocks += 1
        self.stats.num_used_places = len(self._places)
        return True

    def reuse(self, place: int) -> None:
        """Let a place without contents be taken again."""
        self._free.append(place)

    def clear(self) -> None:
        """Forget all contents, and the blocks that wait."""
        self._drop_waiting()
        self._free += self._hashes
        self._places.clear()
        self._hashes.clear()
        self.stats.num_used_places = 0

    def _drop_waiting(self) -> None:
        self.queue.clear()
        self._fresh.clear()
        self._first.clear()

    def _put(self, place: int, block_hash: BlockHash) -> None:
        self._places[block_hash] = place
        self._hashes[place] = block_hash
