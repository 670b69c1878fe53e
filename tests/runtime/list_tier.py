"""A slower cache tier for tests: it stores evicted blocks, and drops the oldest when it is full."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.types.step import BlockTransfer


class ListTier:
    """Room for `num_places` blocks. Keeps only an index: which block is in which place.

    Attributes:
        num_loads: how many places were loaded.
    """

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places))
        self._places: dict[BlockHash, int] = {}  # oldest first
        self._held: list[int] = []
        self._stores: list[BlockTransfer] = []
        self.num_loads = 0

    def find(self, block_hash: BlockHash) -> int | None:
        return self._places.get(block_hash)

    def on_evict(self, block_id: int, block_hash: BlockHash) -> None:
        if block_hash in self._places:
            return
        if not self._free:
            oldest = next((h for h, place in self._places.items() if place not in self._held), None)
            if oldest is None:
                return
            self._free.append(self._places.pop(oldest))
        place = self._free.pop()
        self._places[block_hash] = place
        self._stores.append(BlockTransfer(0, False, [block_id], [place]))

    def take_stores(self) -> list[BlockTransfer]:
        stores, self._stores = self._stores, []
        return stores

    def hold(self, places: Sequence[int]) -> None:
        self._held += places
        self.num_loads += len(places)

    def release(self, places: Sequence[int]) -> None:
        for place in places:
            self._held.remove(place)

    def clear(self) -> None:
        self._free += self._places.values()
        self._places.clear()
