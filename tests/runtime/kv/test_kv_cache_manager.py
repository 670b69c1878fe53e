"""Compares block tables and shared prefixes with literal values. A block has 4 tokens here."""

from __future__ import annotations

import pytest

from ostinato.runtime.kv.block_pool import hash_root
from ostinato.runtime.kv.block_table import BlockTable, GroupBlocks
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager, NewBlocks
from ostinato.runtime.kv.prefix_index import PrefixMatch


def make_cache(total_blocks: int = 11, *, prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(total_blocks, 4, enable_prefix_caching=prefix_caching)


class Tokens:
    """A sequence as the cache sees it: token ids and a table."""

    def __init__(
        self,
        token_ids: range | list[int],
        salt: str = "",
        keys: tuple[str, ...] = (),
        extras: dict[int, bytes] | None = None,
    ) -> None:
        self.ids = list(token_ids)
        self.table = BlockTable(hash_root(salt, keys), extras)


def match(cache: KVCacheManager, tokens: Tokens) -> list[int]:
    """Blocks of the longest cached prefix that leaves at least the last token to compute."""
    return cache.match_prefix(tokens.table, tokens.ids, len(tokens.ids) - 1).block_ids


def compute(cache: KVCacheManager, tokens: Tokens, num_tokens: int) -> None:
    """Call what the scheduler calls when a step has computed a sequence up to `num_tokens`."""
    cache.register(tokens.table, tokens.ids, num_tokens)


def matched(block_ids: list[int]) -> PrefixMatch:
    return PrefixMatch(4 * len(block_ids), [GroupBlocks(block_ids)])


def admit(cache: KVCacheManager, tokens: Tokens, cached_block_ids: list[int]) -> bool:
    copies = cache.admit(tokens.table, matched(cached_block_ids), len(tokens.ids))
    assert not copies, "whole blocks are shared, not copied"
    return copies is not None


def run_prompt(cache: KVCacheManager, tokens: Tokens) -> list[int]:
    """Admit a sequence and compute all its tokens; returns its block ids."""
    assert admit(cache, tokens, match(cache, tokens))
    compute(cache, tokens, len(tokens.ids))
    return tokens.table.block_ids


def test_an_empty_cache_knows_no_prefix() -> None:
    cache, sequence = make_cache(), Tokens(range(10))
    assert match(cache, sequence) == []
    assert admit(cache, sequence, [])
    assert sequence.table.block_ids == [1, 2, 3]
    assert (cache.num_blocks, cache.num_free_blocks) == (10, 7)
    cache.check_integrity([sequence.table])


def test_a_prefix_is_shared_while_its_owner_runs() -> None:
    cache, first = make_cache(), Tokens(range(10))
    run_prompt(cache, first)
    second = Tokens([*range(8), 90, 91, 92])
    assert match(cache, second) == [1, 2]
    assert admit(cache, second, [1, 2])
    assert second.table.block_ids == [1, 2, 4]
    assert second.table.num_registered == 2
    assert cache.num_free_blocks == 6
    cache.check_integrity([first.table, second.table])


def test_a_prefix_is_found_after_its_owner_left() -> None:
    cache, first = make_cache(), Tokens(range(10))
    run_prompt(cache, first)
    cache.free(first.table)
    assert cache.num_free_blocks == 10
    second = Tokens(range(10))
    assert match(cache, second) == [1, 2]
    assert cache.num_missing_blocks(10, matched([1, 2])) == 3
    assert admit(cache, second, [1, 2])
    assert second.table.block_ids == [1, 2, 3]
    cache.check_integrity([second.table])


def test_the_last_token_of_a_known_prompt_is_still_computed() -> None:
    cache = make_cache()
    run_prompt(cache, Tokens(range(8)))
    again = Tokens(range(8))
    assert match(cache, again) == [1]
    assert run_prompt(cache, again) == [1, 3]  # block 3 has the contents of block 2: a duplicate
    assert match(cache, Tokens(range(9))) == [1, 2]


def test_a_block_is_found_only_once_a_step_computes_it() -> None:
    cache, first, second = make_cache(), Tokens(range(13)), Tokens(range(13))
    assert admit(cache, first, [])
    assert first.table.block_ids == [1, 2, 3, 4]
    assert match(cache, second) == []
    compute(cache, first, 7)
    assert match(cache, second) == [1]
    compute(cache, first, 8)
    assert match(cache, second) == [1, 2]
    compute(cache, first, 13)
    assert match(cache, second) == [1, 2, 3]


def test_blocks_that_were_never_computed_are_not_found_after_their_owner_left() -> None:
    cache, first = make_cache(), Tokens(range(13))
    assert admit(cache, first, [])
    compute(cache, first, 5)
    cache.free(first.table)
    assert match(cache, Tokens(range(13))) == [1]


def test_output_tokens_fill_blocks_too() -> None:
    cache, first = make_cache(), Tokens(range(6))
    run_prompt(cache, first)
    first.ids += [70, 71]
    assert cache.allocate(first.table, 8, 0) == NewBlocks([])
    compute(cache, first, 7)
    follow_up = Tokens([*range(6), 70, 71, 80])
    assert match(cache, follow_up) == [1]
    compute(cache, first, 8)
    assert match(cache, follow_up) == [1, 2]


def test_a_block_with_a_token_that_has_not_arrived_is_not_found() -> None:
    cache, first = make_cache(), Tokens(range(7))
    run_prompt(cache, first)
    compute(cache, first, 8)  # the token at position 7 is still on the device
    assert first.table.num_registered == 1
    first.ids.append(70)
    compute(cache, first, 8)
    assert first.table.num_registered == 2
    assert match(cache, Tokens([*range(7), 70, 80])) == [1, 2]


def test_salts_separate_caches() -> None:
    cache = make_cache()
    run_prompt(cache, Tokens(range(9), salt="a"))
    assert match(cache, Tokens(range(9), salt="a")) == [1, 2]
    assert match(cache, Tokens(range(9), salt="b")) == []
    assert match(cache, Tokens(range(9))) == []


def test_an_evicted_beginning_ends_the_match() -> None:
    cache = make_cache(total_blocks=4)
    first = Tokens(range(12))
    run_prompt(cache, first)
    cache.free(first.table)
    other = Tokens(range(50, 54))
    assert run_prompt(cache, other) == [3]  # the end of the prefix goes first
    assert match(cache, Tokens(range(12))) == [1, 2]
    assert cache.num_evictions == 1


def test_a_shortage_changes_nothing() -> None:
    cache, first = make_cache(total_blocks=5), Tokens(range(8))
    run_prompt(cache, first)
    cache.free(first.table)
    long = Tokens(range(17))
    assert match(cache, long) == [1, 2]
    # Three new blocks, and the two of the prefix, which come from the free list, too.
    assert cache.num_missing_blocks(17, matched([1, 2])) == 5
    assert not admit(cache, long, [1, 2])
    assert (long.table.block_ids, cache.num_free_blocks) == ([], 4)
    cache.check_integrity([])


def test_allocate_extends_a_table_by_whole_blocks() -> None:
    cache, sequence = make_cache(total_blocks=4), Tokens(range(4))
    run_prompt(cache, sequence)
    assert cache.allocate(sequence.table, 4, 0) == NewBlocks([])
    assert cache.allocate(sequence.table, 5, 0) == NewBlocks([2])
    assert cache.allocate(sequence.table, 8, 0) == NewBlocks([])
    assert cache.allocate(sequence.table, 13, 0) is None
    assert cache.allocate(sequence.table, 9, 0) == NewBlocks([3])
    assert sequence.table.block_ids == [1, 2, 3]


def test_lookups_count_the_queried_and_the_found_tokens() -> None:
    cache = make_cache()
    cache.count_lookup(10, 0)
    cache.count_lookup(10, 8)
    assert (cache.prefix_queries, cache.prefix_hits) == (20, 8)


def test_a_table_that_gave_up_its_blocks_is_admitted_again() -> None:
    cache = make_cache()
    first, second = Tokens(range(10)), Tokens(range(10))
    run_prompt(cache, first)
    run_prompt(cache, second)
    cache.free(second.table)
    assert (second.table.block_ids, second.table.num_registered) == ([], 0)
    assert run_prompt(cache, second) == [1, 2, 4]


def test_extra_keys_separate_caches_and_their_order_counts() -> None:
    cache = make_cache()
    run_prompt(cache, Tokens(range(9), keys=("adapter", "image")))
    assert match(cache, Tokens(range(9), keys=("adapter", "image"))) == [1, 2]
    for keys in ((), ("adapter",), ("image", "adapter"), ("adapterimage",)):
        assert match(cache, Tokens(range(9), keys=keys)) == []
    assert match(cache, Tokens(range(9), salt="adapter", keys=("image",))) == []


def test_a_block_with_another_extra_ends_the_match() -> None:
    cache = make_cache()
    run_prompt(cache, Tokens(range(13), extras={1: b"cat"}))
    assert match(cache, Tokens(range(13), extras={1: b"cat"})) == [1, 2, 3]
    assert match(cache, Tokens(range(13), extras={1: b"dog"})) == [1]
    assert match(cache, Tokens(range(13))) == [1]


def test_a_fork_shares_blocks_until_it_writes() -> None:
    cache = make_cache()
    parent = Tokens(range(6))
    run_prompt(cache, parent)
    child = parent.table.fork()
    cache.fork(parent.table, child)
    assert child.block_ids == [1, 2]
    assert child.hashes == parent.table.hashes
    assert cache.make_writable(child, 6) == [(2, 3)]
    assert cache.make_writable(parent.table, 6) == []
    assert (parent.table.block_ids, child.block_ids) == ([1, 2], [1, 3])
    cache.check_integrity([parent.table, child])


def test_without_prefix_caching_nothing_is_shared_or_counted() -> None:
    cache = make_cache(prefix_caching=False)
    assert run_prompt(cache, Tokens(range(8))) == [1, 2]
    assert run_prompt(cache, Tokens(range(8))) == [3, 4]
    cache.count_lookup(8, 0)
    assert (cache.prefix_queries, cache.prefix_hits) == (0, 0)


def test_reclaimable_blocks_are_those_that_are_not_shared() -> None:
    cache = make_cache()
    first, second = Tokens(range(10)), Tokens([*range(8), 90])
    run_prompt(cache, first)
    assert cache.num_reclaimable_blocks(first.table) == 3
    run_prompt(cache, second)
    assert cache.num_reclaimable_blocks(first.table) == 1


def test_reset_waits_until_no_block_is_held() -> None:
    cache, sequence = make_cache(), Tokens(range(9))
    run_prompt(cache, sequence)
    assert not cache.reset()
    assert match(cache, Tokens(range(9))) == [1, 2]
    cache.free(sequence.table)
    assert cache.reset()
    assert match(cache, Tokens(range(9))) == []


def test_integrity_check_sees_a_table_that_is_not_accounted_for() -> None:
    cache, sequence = make_cache(), Tokens(range(9))
    run_prompt(cache, sequence)
    with pytest.raises(AssertionError, match="block 1 has 1 references and is in 0 tables"):
        cache.check_integrity([])
    cache.check_integrity([sequence.table])


def test_a_block_needs_a_token() -> None:
    with pytest.raises(ValueError, match=r"cache.block_size must be at least 1 token, got 0"):
        KVCacheManager(8, 0)
