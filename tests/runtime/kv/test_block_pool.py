"""Compares `BlockPool` with literal values, and with a slow and simple model of it."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato.runtime.kv.block_pool import BlockHash, BlockPool, hash_blocks, hash_root

A, B, C, D = (BlockHash(letter.encode()) for letter in "ABCD")


def register_all(pool: BlockPool, block_ids: list[int], hashes: list[BlockHash]) -> None:
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        assert pool.register(block_id, block_hash)


def test_a_new_pool_hands_out_every_block_but_the_null_block() -> None:
    pool = BlockPool(5)
    assert (pool.num_blocks, pool.num_free) == (4, 4)
    assert pool.free_block_ids() == [1, 2, 3, 4]
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.free_block_ids() == [4]
    assert pool.allocate(1) == [4]
    assert pool.num_free == 0


def test_a_shortage_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    assert pool.allocate(3) is None
    assert pool.free_block_ids() == [2, 3]
    assert pool.allocate(0) == []
    pool.check_integrity()


def test_blocks_without_a_hash_are_reused_first() -> None:
    pool = BlockPool(6)
    assert pool.allocate(3) == [1, 2, 3]
    pool.free([1, 2, 3])
    assert pool.free_block_ids() == [1, 2, 3, 4, 5]


def test_hashed_blocks_join_the_tail_with_the_end_of_the_table_first() -> None:
    pool = BlockPool(6)
    register_all(pool, pool.allocate(3) or [], [A, B, C])
    pool.free([1, 2, 3])
    assert pool.free_block_ids() == [4, 5, 3, 2, 1]


def test_a_partial_last_block_goes_to_the_head_and_the_full_ones_to_the_tail() -> None:
    pool = BlockPool(6)
    pool.allocate(3)
    register_all(pool, [1, 2], [A, B])
    pool.free([1, 2, 3])
    assert pool.free_block_ids() == [3, 4, 5, 2, 1]


def test_reuse_forgets_the_contents_and_counts_an_eviction() -> None:
    pool = BlockPool(4)
    register_all(pool, pool.allocate(3) or [], [A, B, C])
    pool.free([1, 2, 3])
    assert [pool.get_cached(block_hash) for block_hash in (A, B, C)] == [1, 2, 3]
    assert pool.allocate(2) == [3, 2]
    assert [pool.get_cached(block_hash) for block_hash in (A, B, C)] == [1, None, None]
    assert (pool.num_evictions, pool.num_cached) == (2, 1)
    pool.check_integrity()


def test_touch_takes_a_block_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(6)
    register_all(pool, pool.allocate(5) or [], [A, B, C, D, BlockHash(b"E")])
    pool.free([1, 2, 3, 4, 5])
    assert pool.free_block_ids() == [5, 4, 3, 2, 1]
    pool.touch([3])
    assert pool.free_block_ids() == [5, 4, 2, 1]
    assert (pool.ref_count(3), pool.num_free, pool.num_evictions) == (1, 4, 0)
    pool.touch([3, 5, 1])
    assert pool.free_block_ids() == [4, 2]
    assert [pool.ref_count(block_id) for block_id in (1, 3, 5)] == [1, 2, 1]
    pool.check_integrity()


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    register_all(pool, pool.allocate(1) or [], [A])
    pool.touch([1])
    pool.free([1])
    assert pool.free_block_ids() == [2, 3]
    pool.free([1])
    assert pool.free_block_ids() == [2, 3, 1]


def test_recently_used_prefixes_are_evicted_last() -> None:
    pool = BlockPool(4)
    register_all(pool, pool.allocate(3) or [], [A, B, C])
    for block_id in (1, 2, 3):
        pool.free([block_id])
    pool.touch([1])  # used again, so it becomes the youngest
    pool.free([1])
    assert pool.free_block_ids() == [2, 3, 1]


def test_the_first_block_with_some_contents_keeps_the_hash() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    assert pool.register(1, A)
    assert not pool.register(2, A)
    pool.free([2])
    assert pool.free_block_ids() == [2, 3]
    assert pool.get_cached(A) == 1


def test_counts_of_held_and_unheld_blocks() -> None:
    pool = BlockPool(5)
    register_all(pool, pool.allocate(3) or [], [A, B, C])
    pool.touch([1])
    pool.free([3])
    assert pool.num_held_once([1, 2, 3]) == 1
    assert pool.num_unheld([1, 2, 3]) == 1


def test_forget_cached_keeps_the_blocks_and_drops_the_hashes() -> None:
    pool = BlockPool(4)
    register_all(pool, pool.allocate(2) or [], [A, B])
    pool.free([2])
    pool.forget_cached()
    assert (pool.get_cached(A), pool.get_cached(B), pool.num_cached) == (None, None, 0)
    assert pool.free_block_ids() == [3, 2]
    pool.check_integrity()


@pytest.mark.parametrize("block_id", [0, 1, 2])
def test_a_block_without_a_holder_can_not_be_freed(block_id: int) -> None:
    pool = BlockPool(3)
    pool.free(pool.allocate(1) or [])
    with pytest.raises(RuntimeError, match=f"block {block_id} is freed and no table holds it"):
        pool.free([block_id])


@pytest.mark.parametrize("total_blocks", [0, 1])
def test_a_pool_needs_a_usable_block(total_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 blocks .* got {total_blocks}"):
        BlockPool(total_blocks)


def test_integrity_check_sees_a_wrong_count() -> None:
    pool = BlockPool(4)
    pool.num_free += 1
    with pytest.raises(AssertionError, match="3 blocks are listed free, 4 counted"):
        pool.check_integrity()


def test_hashes_are_the_chain_that_the_docstring_states() -> None:
    root = hash_root("")
    first = hashlib.blake2b(root + struct.pack("<4I", 1, 2, 3, 4), digest_size=32).digest()
    second = hashlib.blake2b(
        first + struct.pack("<4I", 5, 6, 7, 4294967295), digest_size=32
    ).digest()
    assert hash_blocks(root, [1, 2, 3, 4, 5, 6, 7, 4294967295], 4) == [first, second]
    assert hash_blocks(BlockHash(first), [5, 6, 7, 4294967295], 4) == [second]


def test_equal_blocks_after_different_prefixes_have_different_hashes() -> None:
    left = hash_blocks(hash_root(""), [1, 2, 9, 9], 2)
    right = hash_blocks(hash_root(""), [1, 3, 9, 9], 2)
    salted = hash_blocks(hash_root("tenant"), [1, 2, 9, 9], 2)
    assert len({*left, *right, *salted}) == 6


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_a_token_id_that_is_no_unsigned_32_bit_integer_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        hash_blocks(hash_root(""), [1, token_id], 2)


class PoolMachine(RuleBasedStateMachine):
    """Random calls, compared with a free list that is a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.free = list(range(1, 9))
        self.tables: list[list[int]] = []
        self.hashes: dict[int, BlockHash] = {}  # by block id
        self.num_hashes = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        block_ids = self.pool.allocate(count)
        if count > len(self.free):
            assert block_ids is None
            return
        assert block_ids is not None
        assert block_ids == self.free[:count]
        del self.free[:count]
        for block_id in block_ids:
            self.hashes.pop(block_id, None)
        self.tables.append(block_ids)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from([i for table in self.tables for i in table]))
        if block_id not in self.hashes:
            self.num_hashes += 1
            self.hashes[block_id] = BlockHash(b"%d" % self.num_hashes)
            assert self.pool.register(block_id, self.hashes[block_id])

    @precondition(lambda self: self.hashes)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        ids = st.lists(st.sampled_from(sorted(self.hashes)), unique=True, max_size=4)
        block_ids = data.draw(ids)
        assert [self.pool.get_cached(self.hashes[block_id]) for block_id in block_ids] == block_ids
        self.pool.touch(block_ids)
        self.free = [block_id for block_id in self.free if block_id not in block_ids]
        self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        for block_id in reversed(table):
            if not any(block_id in other for other in self.tables):
                self.free.insert(len(self.free) if block_id in self.hashes else 0, block_id)

    @rule()
    def forget(self) -> None:
        self.pool.forget_cached()
        self.hashes.clear()

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free_block_ids() == self.free
        assert self.pool.num_free == len(self.free)
        for block_id in range(9):
            held = sum(table.count(block_id) for table in self.tables)
            assert self.pool.ref_count(block_id) == held
        self.pool.check_integrity()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
