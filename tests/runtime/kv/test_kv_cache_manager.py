"""KVCacheManager: block tables and prefix sharing as literals. Blocks hold 4 tokens here."""

from __future__ import annotations

import pytest

from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.sequence import Sequence
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request


def make_cache(total_blocks: int = 11, *, prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(total_blocks, 4, enable_prefix_caching=prefix_caching)


def make_sequence(token_ids: range | list[int], salt: str = "") -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=list(token_ids),
        sampling=SamplingParams(max_tokens=8),
        cache_salt=salt,
    )
    return Sequence(request, (0, 0), max_model_len=100)


def compute(cache: KVCacheManager, sequence: Sequence, num_tokens: int) -> None:
    """What the scheduler does for a sequence that a step brings to `num_tokens` computed tokens."""
    sequence.num_computed_tokens = num_tokens
    cache.register(sequence)


def run_prompt(cache: KVCacheManager, sequence: Sequence) -> list[int]:
    """Admit a sequence and compute all its tokens; its block table."""
    assert cache.admit(sequence, cache.match_prefix(sequence))
    compute(cache, sequence, sequence.num_tokens)
    return sequence.block_table


def test_an_empty_cache_knows_no_prefix() -> None:
    cache, sequence = make_cache(), make_sequence(range(10))
    assert cache.match_prefix(sequence) == []
    assert cache.admit(sequence, [])
    assert sequence.block_table == [1, 2, 3]
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (0, 0)
    assert (cache.num_blocks, cache.num_free_blocks) == (10, 7)
    cache.check_integrity([sequence])


def test_a_prefix_is_shared_while_its_owner_runs() -> None:
    cache, first = make_cache(), make_sequence(range(10))
    run_prompt(cache, first)
    second = make_sequence([*range(8), 90, 91, 92])
    assert cache.match_prefix(second) == [1, 2]
    assert cache.admit(second, [1, 2])
    assert second.block_table == [1, 2, 4]
    assert (second.num_computed_tokens, second.num_cached_tokens) == (8, 8)
    assert cache.num_free_blocks == 6
    cache.check_integrity([first, second])


def test_a_prefix_is_found_after_its_owner_left() -> None:
    cache, first = make_cache(), make_sequence(range(10))
    run_prompt(cache, first)
    cache.free(first)
    assert cache.num_free_blocks == 10
    second = make_sequence(range(10))
    assert cache.match_prefix(second) == [1, 2]
    assert cache.num_missing_blocks(10, [1, 2]) == 3
    assert cache.admit(second, [1, 2])
    assert second.block_table == [1, 2, 3]
    cache.check_integrity([second])


def test_the_last_token_of_a_known_prompt_is_still_computed() -> None:
    cache = make_cache()
    run_prompt(cache, make_sequence(range(8)))
    again = make_sequence(range(8))
    assert cache.match_prefix(again) == [1]
    assert run_prompt(cache, again) == [1, 3]  # block 3 has the contents of block 2: a duplicate
    assert cache.match_prefix(make_sequence(range(9))) == [1, 2]


def test_a_block_is_found_only_once_a_step_computes_it() -> None:
    cache, first, second = make_cache(), make_sequence(range(13)), make_sequence(range(13))
    assert cache.admit(first, [])
    assert first.block_table == [1, 2, 3, 4]
    assert cache.match_prefix(second) == []
    compute(cache, first, 7)
    assert cache.match_prefix(second) == [1]
    compute(cache, first, 8)
    assert cache.match_prefix(second) == [1, 2]
    compute(cache, first, 13)
    assert cache.match_prefix(second) == [1, 2, 3]


def test_blocks_that_were_never_computed_are_not_found_after_their_owner_left() -> None:
    cache, first = make_cache(), make_sequence(range(13))
    assert cache.admit(first, [])
    compute(cache, first, 5)
    cache.free(first)
    assert cache.match_prefix(make_sequence(range(13))) == [1]


def test_output_tokens_fill_blocks_too() -> None:
    cache, first = make_cache(), make_sequence(range(6))
    run_prompt(cache, first)
    first.token_ids += [70, 71]
    assert cache.allocate(first, 8) == []
    compute(cache, first, 7)
    follow_up = make_sequence([*range(6), 70, 71, 80])
    assert cache.match_prefix(follow_up) == [1]
    compute(cache, first, 8)
    assert cache.match_prefix(follow_up) == [1, 2]


def test_a_block_with_a_token_that_has_not_arrived_is_not_found() -> None:
    cache, first = make_cache(), make_sequence(range(7))
    run_prompt(cache, first)
    compute(
        cache, first, 8
    )  # position 7 is being computed from a token that is still on the device
    assert first.num_registered_blocks == 1
    first.token_ids.append(70)
    cache.register(first)
    assert first.num_registered_blocks == 2
    assert cache.match_prefix(make_sequence([*range(7), 70, 80])) == [1, 2]


def test_salts_separate_caches() -> None:
    cache = make_cache()
    run_prompt(cache, make_sequence(range(9), salt="a"))
    assert cache.match_prefix(make_sequence(range(9), salt="a")) == [1, 2]
    assert cache.match_prefix(make_sequence(range(9), salt="b")) == []
    assert cache.match_prefix(make_sequence(range(9))) == []


def test_an_evicted_beginning_ends_the_match() -> None:
    cache = make_cache(total_blocks=4)
    first = make_sequence(range(12))
    run_prompt(cache, first)
    cache.free(first)
    other = make_sequence(range(50, 54))
    assert run_prompt(cache, other) == [3]  # the end of the prefix goes first
    assert cache.match_prefix(make_sequence(range(12))) == [1, 2]
    assert cache.num_evictions == 1


def test_a_shortage_changes_nothing() -> None:
    cache, first = make_cache(total_blocks=5), make_sequence(range(8))
    run_prompt(cache, first)
    cache.free(first)
    long = make_sequence(range(17))
    assert cache.match_prefix(long) == [1, 2]
    assert cache.num_missing_blocks(17, [1, 2]) == 5  # three new ones and two that are free as well
    assert not cache.admit(long, [1, 2])
    assert (long.block_table, long.num_cached_tokens, cache.num_free_blocks) == ([], None, 4)
    assert (cache.prefix_queries, cache.prefix_hits) == (8, 0)
    cache.check_integrity([])


def test_allocate_extends_a_table_by_whole_blocks() -> None:
    cache, sequence = make_cache(total_blocks=4), make_sequence(range(4))
    run_prompt(cache, sequence)
    assert cache.allocate(sequence, 4) == []
    assert cache.allocate(sequence, 5) == [2]
    assert cache.allocate(sequence, 8) == []
    assert cache.allocate(sequence, 13) is None
    assert cache.allocate(sequence, 9) == [3]
    assert sequence.block_table == [1, 2, 3]


def test_statistics_count_the_first_admission_only() -> None:
    cache = make_cache()
    first, second = make_sequence(range(10)), make_sequence(range(10))
    run_prompt(cache, first)
    assert (cache.prefix_queries, cache.prefix_hits) == (10, 0)
    run_prompt(cache, second)
    assert (cache.prefix_queries, cache.prefix_hits) == (20, 8)
    cache.free(second)
    assert run_prompt(cache, second) == [1, 2, 4]  # back after preemption
    assert (cache.prefix_queries, cache.prefix_hits) == (20, 8)
    assert second.num_cached_tokens == 8


def test_without_prefix_caching_nothing_is_shared_or_counted() -> None:
    cache = make_cache(prefix_caching=False)
    assert run_prompt(cache, make_sequence(range(8))) == [1, 2]
    assert run_prompt(cache, make_sequence(range(8))) == [3, 4]
    assert (cache.prefix_queries, cache.prefix_hits) == (0, 0)


def test_reclaimable_blocks_are_those_that_nobody_shares() -> None:
    cache = make_cache()
    first, second = make_sequence(range(10)), make_sequence([*range(8), 90])
    run_prompt(cache, first)
    assert cache.num_reclaimable_blocks(first) == 3
    run_prompt(cache, second)
    assert cache.num_reclaimable_blocks(first) == 1


def test_reset_waits_until_nobody_holds_blocks() -> None:
    cache, sequence = make_cache(), make_sequence(range(9))
    run_prompt(cache, sequence)
    assert not cache.reset()
    assert cache.match_prefix(make_sequence(range(9))) == [1, 2]
    cache.free(sequence)
    assert cache.reset()
    assert cache.match_prefix(make_sequence(range(9))) == []


def test_integrity_check_sees_a_table_that_nobody_accounts_for() -> None:
    cache, sequence = make_cache(), make_sequence(range(9))
    run_prompt(cache, sequence)
    with pytest.raises(AssertionError, match="block 1 has 1 references and is in 0 tables"):
        cache.check_integrity([])
    cache.check_integrity([sequence])


def test_a_block_needs_a_token() -> None:
    with pytest.raises(ValueError, match=r"cache.block_size must be at least 1 token, got 0"):
        KVCacheManager(8, 0)
