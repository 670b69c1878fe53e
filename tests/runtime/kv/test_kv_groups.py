"""Block tables of several groups: what is freed, found and copied. A unit has 4 tokens here."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ostinato.models.kv_groups import (
    REPEATED_TOKENS,
    WHOLE_CACHE,
    KVGroup,
    kv_groups,
    layer_places,
    num_slots,
)
from ostinato.runtime.kv.block_table import BlockTable
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager

UNIT = 4
# Layers without a window have blocks of 12 tokens, layers with a window have blocks of 4.
GROUPS = (KVGroup(0, 3, 1), KVGroup(8, 1, 3))
WINDOWS = st.lists(st.sampled_from([0, 0, 16, 16, 16, -16]), min_size=1, max_size=40)


@given(windows=WINDOWS, bounds=st.lists(st.integers(0, 40), max_size=3))
def test_places_of_layers_do_not_overlap(windows: list[int], bounds: list[int]) -> None:
    """In each stage of a pipeline, and every layer's block fits into the blocks of the pool."""
    groups = kv_groups(windows, 1000)
    largest = max(group.units * group.pieces for group in groups)
    cuts = sorted({0, len(windows), *(min(one, len(windows)) for one in bounds)})
    for begin, end in pairwise(cuts):
        stage = windows[begin:end]
        places = layer_places(stage, groups)
        assert len(set(places)) == len(places) == len(stage)
        for window, (group, slot, piece) in zip(stage, places, strict=True):
            assert (groups[group].window != 0) == (window != 0) or len(groups) == 1
            assert slot < num_slots(stage, groups)
            assert (piece + 1) * groups[group].units <= largest


def test_no_groups_without_a_use() -> None:
    assert kv_groups([0, 0], 1000) == WHOLE_CACHE
    assert kv_groups([64, 64, 0], 64) == WHOLE_CACHE  # no sequence is longer than the window
    assert kv_groups([64, -128], 1000) == (KVGroup(128),)


def fill(cache: KVCacheManager, token_ids: list[int]) -> BlockTable:
    """Compute a prompt in one step."""
    cache.begin_step()
    table = cache.new_table(len(token_ids))
    match = cache.match_prefix(table, token_ids, len(token_ids) - 1)
    assert cache.admit(table, match, len(token_ids)) is not None
    cache.register(table, token_ids, len(token_ids))
    cache.check_integrity()
    return table


def test_blocks_behind_the_window_are_freed_and_still_found() -> None:
    cache = KVCacheManager(41, UNIT, groups=GROUPS, step_tokens=64)
    token_ids = list(range(40))
    table = fill(cache, token_ids)
    full, windowed = table.groups
    assert (len(full.ids), len(windowed.ids)) == (4, 10)
    position = 32 + REPEATED_TOKENS  # the token at 32 can be computed again; it reads 25 to 32
    assert cache.allocate(table, position, position) is not None
    assert windowed.ids[:6] == [0] * 6
    assert windowed.num_freed == 6
    assert cache.num_free_blocks == 40 - 4 - 4
    other = cache.new_table(40)
    match = cache.match_prefix(other, token_ids, 39)
    assert match.num_tokens == 36
    assert match.groups[1].ids[:7] == [0] * 7  # the token at 36 reads 29 to 36
    cache.free(table)
    assert cache.num_free_blocks == 40


def test_a_prefix_without_its_window_is_not_found() -> None:
    """A running sequence holds all full blocks, and the windowed blocks of its end alone."""
    cache = KVCacheManager(21, UNIT, groups=GROUPS, step_tokens=64)
    token_ids = list(range(40))
    table = fill(cache, token_ids)
    cache.begin_step()
    assert cache.allocate(table, 40, 40) is not None
    shorter = [*range(20), 77]
    assert cache.match_prefix(cache.new_table(21), shorter, 20).num_tokens == 20
    for first in (100, 200):  # these evict what is free
        cache.free(fill(cache, list(range(first, first + 36))))
    assert cache.num_evictions > 0
    cache.begin_step()
    assert cache.match_prefix(cache.new_table(21), shorter, 20).num_tokens == 0
    assert cache.match_prefix(cache.new_table(40), token_ids, 39).num_tokens == 36


def test_a_block_that_is_needed_in_part_is_copied() -> None:
    cache = KVCacheManager(41, UNIT, groups=GROUPS, step_tokens=64)
    first = fill(cache, list(range(24)))
    token_ids = [*range(20), 77, 78, 79, 80, 81]  # equal for 5 units: one block and two units
    cache.begin_step()
    table = cache.new_table(len(token_ids))
    match = cache.match_prefix(table, token_ids, len(token_ids) - 1)
    assert match.num_tokens == 20
    copies = cache.admit(table, match, len(token_ids))
    assert copies == [(first.groups[0].ids[1], table.groups[0].ids[1])]
    assert table.groups[0].ids[0] == first.groups[0].ids[0]
    cache.check_integrity([first, table])


def test_a_block_is_not_copied_in_the_step_that_fills_it() -> None:
    """Copies are made before the step writes. Whole blocks are shared in the same step."""
    cache = KVCacheManager(41, UNIT, groups=GROUPS, step_tokens=64)
    first = fill(cache, list(range(21)))
    token_ids = [*range(20), 77]
    table = cache.new_table(len(token_ids))
    match = cache.match_prefix(table, token_ids, 20)
    assert match.num_tokens == 12
    assert match.groups[0].ids == first.groups[0].ids[:1]
    cache.begin_step()
    assert cache.match_prefix(table, token_ids, 20).num_tokens == 20


def test_a_copied_block_is_found_after_its_source_is_gone() -> None:
    """The last unit's hash finds the copy. Its first units have hashes that found the source."""
    cache = KVCacheManager(41, UNIT, groups=GROUPS, step_tokens=64)
    cache.free(fill(cache, list(range(20))))
    token_ids = [*range(20), *range(50, 66)]
    table = fill(cache, token_ids)  # its second full block is a copy
    cache.begin_step()
    for first in (100, 200, 300):  # these evict what no table holds
        cache.free(fill(cache, list(range(first, first + 40))))
    assert cache.num_evictions > 0
    cache.begin_step()
    other = cache.new_table(len(token_ids) + 1)
    assert cache.match_prefix(other, [*token_ids, 9], len(token_ids)).num_tokens == 36
    shorter = cache.match_prefix(cache.new_table(21), [*range(20), 9], 20)
    assert shorter.num_tokens == 0  # the windowed blocks of its end are gone
    cache.free(table)
