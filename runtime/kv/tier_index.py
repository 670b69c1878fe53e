"""The index of the slower tiers: which KV blocks host memory and the disk hold, and which they get.

A tier is a memory that is slower than the device's and keeps copies of KV blocks. A place holds one
block. The places of all tiers are numbered together: those of host memory first, then those of the
disk. The index belongs to the scheduler. The ranks make the copies (runtime/tiers/rank_tiers.py).

A block is copied after it was computed, while it is still on the device. So it usually has a copy
when the device needs its memory for other contents. A block that still waits for its copy then is
copied before the step writes. It is dropped if too many such copies would delay the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from ostinato.conf.sections.cache_schema import StorePolicy
from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.kv.load_costs import LoadCosts
from ostinato.runtime.kv.tier_places import TierPlaces
from ostinato.runtime.types.step import BlockTransfer
from ostinato.runtime.types.tier_stats import TierStats

__all__ = ("TierIndex",)

# The copies from the device in one step take at most this share of the step's time, at a rate that
# common processors reach, or they have at most `_LEAST_COPY_BYTES`, which takes about a
# millisecond.
_COPY_SHARE = 0.02
_COPY_BYTES_PER_S = 4e9
_LEAST_COPY_BYTES = 4 << 20


class TierIndex:
    """Copies of KV blocks in host memory and on disk.

    Args:
        block_bytes: bytes of a block on the device.
        costs: decides whether a load is faster than computing the blocks.
        num_host_places: blocks that host memory has room for.
        expects_disk: `open_disk` or `close_disk` will be called.
        policy: which blocks are copied.
        stores_salted: whether blocks of requests with a cache salt are copied.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        costs: LoadCosts,
        num_host_places: int = 0,
        expects_disk: bool = False,
        policy: StorePolicy = StorePolicy.prompts,
        stores_salted: bool = False,
    ) -> None:
        self.costs = costs
        self._policy = policy
        self._stores_salted = stores_salted
        self._block_bytes = block_bytes
        self._num_host_places = num_host_places
        self._host = TierPlaces(0, num_host_places) if num_host_places else None
        self._disk = TierPlaces(num_host_places) if expects_disk else None
        self._tiers = [tier for tier in (self._host, self._disk) if tier is not None]
        self._held: Counter[int] = Counter()
        self._lost: set[int] = set()  # places without contents that loads still hold
        self._planned: list[tuple[int, int, BlockHash]] = []  # block id, place, hash
        self._num_buffers = 0  # free buffers of the ranks, for copies on their way to the disk
        self._num_per_step = self._least_per_step = max(1, _LEAST_COPY_BYTES // block_bytes)
        self._num_left = self._num_per_step  # copies that the step being planned may still take

    @property
    def has_stores(self) -> bool:
        """Whether blocks wait for a copy that can be made, if necessary after a wait for buffers.

        While the disk is not open yet, blocks that wait for it do not count.
        """
        waits = any(tier.num_waiting and tier.stats.num_places for tier in self._tiers)
        return waits or bool(self._planned)

    def open_disk(self, num_places: int, contents: Iterable[tuple[int, BlockHash]]) -> None:
        """Note that the disk can be used.

        Args:
            num_places: blocks that it has room for.
            contents: (place, hash) of the blocks that it has, with places counted from 0, the
                oldest first.
        """
        assert self._disk is not None, "the index expects a disk"
        self._disk.open(num_places, contents)

    def close_disk(self) -> None:
        """Do without the disk, because it cannot be used."""
        if self._disk is not None:
            self._tiers.remove(self._disk)
            self._disk = None

    def stop_disk_stores(self) -> None:
        """Plan no more copies to the disk, because it cannot be written. It is still read."""
        if self._disk is not None:
            self._disk.stop_stores()

    def num_kept_blocks(
        self, num_prompt_tokens: int, block_size: int, *, is_salted: bool
    ) -> int | None:
        """How many of a sequence's first blocks are worth a copy; None = none may be copied."""
        if is_salted and not self._stores_salted:
            return None
        if self._policy is StorePolicy.all:
            return 1 << 62
        return num_prompt_tokens // block_size

    def find(self, block_hash: BlockHash) -> int | None:
        """The place with these contents, or None. Host memory comes first."""
        for tier in self._tiers:
            place = tier.find(block_hash)
            if place is not None:
                return place
        return None

    def on_register(self, block_id: int, block_hash: BlockHash) -> None:
        """Note a block that is worth a copy, and that the step being planned may still fill."""
        if self._policy is not StorePolicy.reused:
            for tier in self._tiers:
                tier.add(block_id, block_hash)

    def on_hit(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Note that a sequence uses the first blocks of its prefix again, which the device has.

        Args:
            block_ids: [n], on the device.
            hashes: [n] or more.
        """
        for tier in self._tiers:
            for block_id, block_hash in zip(block_ids, hashes, strict=False):
                tier.add(block_id, block_hash)
            # The end of a prefix is touched first, so it is overwritten before the beginning.
            for index in range(len(block_ids) - 1, -1, -1):
                tier.touch(hashes[index])

    def on_preempt(self, block_id: int, block_hash: BlockHash) -> None:
        """Note that a sequence loses a computed block. It is copied before other blocks."""
        for tier in self._tiers:
            tier.add(block_id, block_hash, is_first=True)

    def on_evict(self, block_id: int, block_hash: BlockHash) -> None:
        """Note that a device block with these contents is about to be reused."""
        for tier in self._tiers:
            if tier.remove(block_hash) and not self._plan(tier, block_id, block_hash):
                tier.stats.num_dropped_blocks += 1

    def take_stores(self) -> list[BlockTransfer]:
        """The copies that the next step makes before it writes."""
        for tier in self._tiers:
            while tier.queue:
                block_hash, block_id = next(iter(tier.queue.items()))
                if not self._plan(tier, block_id, block_hash):
                    break
                del tier.queue[block_hash]
            tier.age()
        self._num_left = self._num_per_step
        if not self._planned:
            return []
        block_ids, places, hashes = (list(column) for column in zip(*self._planned, strict=True))
        self._planned = []
        return [BlockTransfer(0, False, block_ids, places, hashes)]

    def set_buffers(self, num_free: int) -> None:
        """Note how many buffers each rank has free for copies on their way to the disk."""
        self._num_buffers = num_free

    def observe_step(self, seconds: float) -> None:
        """Let the copies of a step take a fixed share of its time."""
        most = int(seconds * _COPY_SHARE * _COPY_BYTES_PER_S) // self._block_bytes
        self._num_per_step = max(self._least_per_step, most)

    def hold(self, places: Sequence[int]) -> None:
        """Keep the contents of these places until `release`, because a load begins."""
        self._held.update(places)

    def release(self, places: Sequence[int], num_loaded: int) -> None:
        """End `hold`, because the load from these places has ended.

        Args:
            places: the places of the load.
            num_loaded: leading places that were loaded. The place after these could not be read.
        """
        self._held.subtract(places)
        self._held = +self._held  # without the zeros
        for place in self._lost.difference(self._held):
            self._lost.discard(place)
            if (tier := self._tier_of(place)) is not None:
                tier.reuse(place)
        for place in places[:num_loaded]:
            if (tier := self._tier_of(place)) is not None:
                tier.stats.num_loaded_blocks += 1
        if num_loaded < len(places):
            self.lose(places[num_loaded])

    def lose(self, place: int) -> None:
        """Note that a place has no contents, because a copy failed."""
        tier = self._tier_of(place)
        if tier is None or not tier.lose(place):
            return
        if place in self._held:
            self._lost.add(place)
        else:
            tier.reuse(place)

    def clear(self) -> None:
        """Forget all contents, and the blocks that wait for copies."""
        self._planned.clear()
        for tier in self._tiers:
            tier.clear()

    def stats(self) -> dict[str, TierStats]:
        """The figures of each tier by its name: host, disk."""
        named = {"host": self._host, "disk": self._disk}
        return {
            name: msgspec.structs.replace(tier.stats)
            for name, tier in named.items()
            if tier is not None
        }

    def _tier_of(self, place: int) -> TierPlaces | None:
        """The tier of a place; None if it was closed."""
        return self._host if place < self._num_host_places else self._disk

    def _plan(self, tier: TierPlaces, block_id: int, block_hash: BlockHash) -> bool:
        """Plan the copy of a block; returns False if it must wait."""
        is_disk = tier is self._disk
        if self._num_left <= 0 or (is_disk and self._num_buffers <= 0):
            return False
        place = tier.take(block_hash, self._held)
        if place is None:
            return False
        self._planned.append((block_id, place, block_hash))
        self._num_left -= 1
        self._num_buffers -= is_disk
        return True
