"""`TierIndex` in single cases: which blocks are copied, in which order, and where to."""

from __future__ import annotations

import pytest

from ostinato.conf.sections.cache_schema import StorePolicy
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.kv.tier_index import TierIndex
from tests.runtime.kv.tier_indexes import hash_of, make_index


def opened(num_places: int, *contents: tuple[int, int], num_buffers: int = 99) -> TierIndex:
    """An index with a disk that has (place, content), the oldest first."""
    index = make_index(expects_disk=True)
    index.open_disk(num_places, [(place, hash_of(content)) for place, content in contents])
    index.set_buffers(num_buffers)
    return index


def copies(index: TierIndex, *contents: int) -> list[tuple[int, int]]:
    """(content, place) of the copies after a step that fills blocks with these contents."""
    for content in contents:
        index.on_register(content, hash_of(content))
    if contents:
        assert index.take_stores() == []
    return [
        (block_hash[0], place)
        for transfer in index.take_stores()
        for block_hash, place in zip(transfer.hashes, transfer.places, strict=True)
    ]


def test_contents_that_were_used_least_recently_are_overwritten() -> None:
    """The end of a prefix goes before its beginning."""
    index = opened(5, (3, 2), (0, 0), (1, 1))
    index.on_hit([7, 8], [hash_of(2), hash_of(1)])
    assert copies(index, 3, 4, 5, 6, 7) == [(3, 2), (4, 4), (5, 0), (6, 1), (7, 3)]
    assert index.stats()["disk"].num_evicted_blocks == 3


def test_a_step_uses_no_more_buffers_than_are_free() -> None:
    index = opened(9, num_buffers=2)
    assert len(copies(index, 1, 2, 3, 4, 5)) == 2
    assert copies(index) == []
    index.set_buffers(1)
    assert len(copies(index)) == 1
    assert index.has_stores


def test_a_place_is_kept_as_long_as_any_load_reads_it() -> None:
    """One load fails at place 0 while another load waits for it. Place 1 cannot be written."""
    index = opened(2, (0, 0), (1, 1))
    for places in ([0, 1], [0], [1]):
        index.hold(places)
    index.release([0, 1], 0)
    assert index.find(hash_of(0)) is None
    index.lose(1)
    assert index.find(hash_of(1)) is None
    assert copies(index, 5) == []
    index.release([0], 1)
    assert copies(index) == [(5, 0)]
    assert copies(index, 6) == [(6, 0)]
    index.release([1], 1)
    assert copies(index, 7) == [(7, 1)]
    assert index.stats()["disk"].num_failed_blocks == 2


def test_a_disk_that_cannot_be_opened_gets_nothing() -> None:
    index = make_index(num_host_places=1, expects_disk=True)
    index.set_buffers(9)
    assert copies(index, 1) == [(1, 0)]
    assert not index.has_stores  # what waits for a disk that is not open cannot be copied
    index.close_disk()
    assert copies(index, 2, 3) == [(2, 0), (3, 0)]
    assert list(index.stats()) == ["host"]


def test_preempted_blocks_come_first_and_what_has_no_time_is_dropped() -> None:
    index = make_index(expects_disk=True, num_per_step=1)
    index.open_disk(9, [])
    index.set_buffers(99)
    for content in range(4):
        index.on_register(content + 1, hash_of(content))
    assert index.take_stores() == []
    index.on_preempt(4, hash_of(3))
    index.on_evict(1, hash_of(0))
    index.on_evict(2, hash_of(1))
    assert [one.block_ids for one in index.take_stores()] == [[1]]
    assert [one.block_ids for one in index.take_stores()] == [[4]]
    assert [one.block_ids for one in index.take_stores()] == [[3]]
    assert not index.has_stores
    assert index.stats()["disk"].num_dropped_blocks == 1


def test_which_blocks_are_worth_a_copy() -> None:
    index = make_index(expects_disk=True)
    assert index.num_kept_blocks(15, 4, is_salted=False) == 3
    assert index.num_kept_blocks(15, 4, is_salted=True) is None
    index = make_index(expects_disk=True, policy=StorePolicy.all, stores_salted=True)
    kept = index.num_kept_blocks(15, 4, is_salted=True)
    assert kept is not None
    assert kept > 1 << 40


@pytest.mark.parametrize("cause", ["hit", "preemption"])
def test_a_block_that_an_output_fills_is_not_copied_in_the_same_step(cause: str) -> None:
    """Another prompt can share the block in the step that fills it. The block is not full yet."""
    index = opened(9)
    cache = KVCacheManager(9, 4, tiers=index)
    first = cache.new_table(4)
    assert cache.admit(first, cache.match_prefix(first, [], 0), 4) is not None
    cache.register(first, [1, 2, 3, 4], 4)
    assert index.take_stores() == []
    assert cache.allocate(first, 8, 0) is not None
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    cache.register(first, tokens, 8)  # the step computes the last output token, 8
    if cause == "hit":
        second = cache.new_table(9)
        match = cache.match_prefix(second, [*tokens, 9], 8)
        assert match.block_ids == first.block_ids
        assert cache.admit(second, match, 9) is not None
    else:
        cache.note_preemption(first)
    [store] = index.take_stores()
    assert store.block_ids == first.block_ids[:1]
    [store] = index.take_stores()
    assert store.block_ids == first.block_ids[1:]


def test_salted_blocks_are_not_copied_for_any_reason() -> None:
    index = make_index(expects_disk=True, policy=StorePolicy.all)
    index.open_disk(9, [])
    index.set_buffers(9)
    cache = KVCacheManager(3, 4, tiers=index)
    for num_found in (0, 1):
        table = cache.new_table(8, "salt")
        match = cache.match_prefix(table, range(8), 7)
        assert len(match.block_ids) == num_found
        assert cache.admit(table, match, 8) is not None
        cache.register(table, range(8), 8)
        cache.note_preemption(table)
        cache.free(table)
    assert index.take_stores() == index.take_stores() == []
    assert not index.has_stores
