"""Slots for states of recurrent layers, with literal values. A unit has 4 tokens here."""

from __future__ import annotations

import pytest

from ostinato.models.kv_groups import KVGroup
from ostinato.runtime.kv.block_table import BlockTable, SequenceStates
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.kv.prefix_index import PrefixMatch
from ostinato.runtime.kv.state_slots import StateSlots


class Cache(KVCacheManager):
    """A manager with slots 1 to `num_slots`, and the calls that the scheduler makes."""

    def __init__(self, num_slots: int, *, prefix_caching: bool = True, num_blocks: int = 60):
        super().__init__(
            num_blocks + 1, 4, enable_prefix_caching=prefix_caching, num_states=num_slots + 1
        )

    @property
    def slots(self) -> StateSlots:
        assert self.states is not None
        return self.states

    def match(self, token_ids: list[int]) -> PrefixMatch:
        table = self.new_table(len(token_ids))
        return self.match_prefix(table, token_ids, len(token_ids) - 1)


class Running:
    """A sequence: its known tokens, its table, and how many of its tokens are planned."""

    def __init__(self, cache: Cache, token_ids: range | list[int]) -> None:
        self.cache, self.ids = cache, list(token_ids)
        self.table = cache.new_table(len(self.ids))
        match = cache.match_prefix(self.table, self.ids, len(self.ids) - 1)
        assert cache.admit(self.table, match, len(self.ids)) == []
        self.planned = match.num_tokens

    @property
    def states(self) -> SequenceStates:
        assert self.table.states is not None
        return self.table.states

    def plan(self, end: int | None = None) -> tuple[int, int, int, int]:
        """Plan the tokens up to `end` in the present step; by default, all known ones."""
        start, self.planned = self.planned, len(self.ids) if end is None else end
        assert self.cache.allocate(self.table, self.planned, start) is not None
        assert self.cache.slots.has_room(self.table)
        plan = self.cache.slots.plan(self.table, self.ids, start, self.planned)
        self.cache.register(self.table, self.ids, self.planned)
        return plan

    def step(self, end: int | None = None) -> tuple[int, int, int, int]:
        """`plan` in a step of its own."""
        self.cache.begin_step()
        return self.plan(end)

    def append(self, *token_ids: int) -> None:
        """Tokens arrive."""
        self.ids += token_ids
        self.cache.register(self.table, self.ids, self.planned)


def tables(*sequences: Running) -> list[BlockTable]:
    return [sequence.table for sequence in sequences]


def test_a_decode_writes_in_place() -> None:
    cache = Cache(4)
    one = Running(cache, range(5))
    assert one.step() == (0, 1, 2, 4)  # and a checkpoint after the first unit
    one.append(50)
    assert one.states.in_place == (1, 1, 0, 0)
    assert one.step() == (1, 1, 0, 0)
    cache.begin_step()
    assert cache.slots.num_free == 3  # a checkpoint counts as free
    cache.check_integrity(tables(one))


def test_states_at_the_end_of_a_unit_are_left() -> None:
    """The next step reads them, so their slot is free for others only after that step."""
    cache = Cache(2)
    one = Running(cache, range(7))
    assert one.step() == (0, 1, 2, 4)
    one.append(7)
    assert one.step() == (1, 1, 0, 0)  # fills the second unit
    one.append(8)
    match = cache.match(list(range(9)))
    assert (match.num_tokens, match.has_fresh_state) == (4, True)
    assert one.step() == (1, 2, 0, 0)  # slot 2 had the least recently used checkpoint
    assert cache.slots.num_free == 0
    cache.begin_step()
    assert cache.slots.num_free == 1
    match = cache.match(list(range(9)))
    assert (match.num_tokens, match.state_slot) == (8, 1)
    cache.check_integrity(tables(one))


def test_a_checkpoint_waits_for_its_last_token() -> None:
    cache = Cache(4)
    one = Running(cache, range(6))
    one.step()
    one.step(7)  # as if the token at 6 were known to the device only
    one.step(8)
    assert one.states.pending == 2
    one.append(6)
    assert one.states.pending == 2
    one.append(7)
    assert one.states.pending == 0
    cache.begin_step()
    assert cache.match(list(range(9))).num_tokens == 8


def test_a_chunk_keeps_the_states_at_its_last_whole_unit() -> None:
    cache = Cache(6)
    one = Running(cache, range(30))
    assert one.step(10) == (0, 1, 2, 8)
    assert one.step(12) == (1, 1, 0, 0)  # its end is a checkpoint, without a further slot
    assert one.step(30) == (1, 3, 4, 16)
    cache.begin_step()
    found = [cache.match([*range(length), 99]).num_tokens for length in (8, 12, 16, 28, 30)]
    assert found == [8, 12, 12, 28, 28]


def test_an_equal_prompt_finds_the_unit_before_its_last_token() -> None:
    cache = Cache(4)
    assert Running(cache, range(8)).step() == (0, 1, 2, 4)
    cache.begin_step()
    assert cache.match(list(range(8))).num_tokens == 4


def test_the_third_request_with_a_prefix_hits() -> None:
    """The second finds blocks without states, and keeps the states where the prompts part."""
    cache = Cache(8)
    shared = list(range(13))
    first = Running(cache, [*shared, *range(100, 110)])
    first.step()
    cache.begin_step()
    match = cache.match([*shared, *range(200, 210)])
    assert (match.num_tokens, match.branch) == (0, 12)
    second = Running(cache, [*shared, *range(200, 210)])
    assert second.states.branch == 12
    second.plan(8)
    assert second.states.branch == 12
    read, write, checkpoint, at = second.step()
    assert (read == write, checkpoint > 0, at) == (False, True, 4)  # after 8 + 4 tokens
    assert second.states.branch == 0
    cache.begin_step()
    match = cache.match([*shared, *range(300, 310)])
    assert (match.num_tokens, match.branch, match.state_slot) == (12, 0, checkpoint)
    third = Running(cache, [*shared, *range(300, 310)])
    assert third.plan()[0] == checkpoint
    cache.check_integrity(tables(first, second, third))


def test_states_of_the_present_step_are_awaited() -> None:
    cache = Cache(8)
    cache.begin_step()
    first = Running(cache, range(10))
    first.plan()
    match = cache.match(list(range(10)))
    assert (match.num_tokens, match.branch, match.has_fresh_state) == (0, 8, True)
    cache.begin_step()
    match = cache.match(list(range(10)))
    assert (match.num_tokens, match.has_fresh_state) == (8, False)


def test_an_answer_keeps_its_last_checkpoint_only() -> None:
    cache = Cache(8)
    one = Running(cache, range(6))
    for token in range(6, 20):
        one.step()
        one.append(token)
    cache.begin_step()
    found = [cache.match([*range(length), 99]).num_tokens for length in (4, 8, 12, 16)]
    assert found == [4, 4, 4, 16]  # that of the prompt stays
    assert cache.slots.num_evictions == 0
    assert cache.slots.num_free == 7


def test_a_checkpoint_before_the_last_one_stays_until_a_token_follows() -> None:
    """A step that gives no token goes back behind its own checkpoint."""
    cache = Cache(8)
    one = Running(cache, range(6))
    for token in range(6, 12):
        one.step()
        one.append(token)
    one.step()  # the step with the token at 11 fills a unit, and gives no token
    assert cache.rewind_states(one.table, one.ids) == 8
    one.planned = 8
    assert one.step()[0] != one.states.slot
    one.append(12)
    one.step()
    cache.check_integrity(tables(one))


def test_a_step_that_gave_no_token_is_repeated_from_the_last_checkpoint() -> None:
    cache = Cache(4)
    one = Running(cache, range(10))
    _, write, checkpoint, at = one.step()
    assert at == 8
    one.step(11)  # planned as if there were a token
    one.step(12)
    assert one.states.pending == 3
    assert cache.rewind_states(one.table, one.ids) == 8
    assert (one.states.slot, one.states.pending) == (checkpoint, 0)
    one.planned = 8
    assert one.step() == (checkpoint, write, 0, 0)
    cache.check_integrity(tables(one))


def test_without_a_checkpoint_a_sequence_begins_again() -> None:
    cache = Cache(2)
    one = Running(cache, range(3))
    one.step()
    assert cache.rewind_states(one.table, one.ids) == 0
    one.planned = 0
    assert one.step()[0] == 0


def test_states_before_a_shared_block_are_not_used_again() -> None:
    cache = Cache(4)
    first = Running(cache, range(10))
    first.step()
    cache.begin_step()
    second = Running(cache, range(10))
    assert second.table.block_ids[:2] == first.table.block_ids[:2]
    assert second.plan()[3] == 0
    others = [Running(cache, range(100 * n, 100 * n + 3)) for n in (1, 2)]
    for other in others:  # these take the slot of the checkpoint
        other.step()
    assert cache.rewind_states(second.table, second.ids) is None
    cache.free(second.table)
    assert cache.rewind_states(first.table, first.ids) == 0
    cache.check_integrity(tables(first, *others))


def test_states_behind_a_window_are_not_used_again() -> None:
    cache = KVCacheManager(41, 4, groups=(KVGroup(5),), step_tokens=64, num_states=9)
    assert cache.states is not None
    table, token_ids = cache.new_table(30), list(range(30))
    assert cache.admit(table, cache.match_prefix(table, token_ids, 29), 30) is not None
    cache.states.plan(table, token_ids, 0, 30)
    assert cache.rewind_states(table, token_ids) == 28
    cache.states.begin_step()
    cache.states._pool.forget_cached()
    cache.states.plan(table, token_ids, 28, 30)
    assert cache.rewind_states(table, token_ids) is None


def test_forks_share_states_until_their_next_step() -> None:
    cache = Cache(3)
    parent = Running(cache, range(5))
    parent.step()
    cache.begin_step()
    child = Running.__new__(Running)
    child.cache, child.ids, child.planned = cache, [*parent.ids, 60], 5
    child.table = parent.table.fork()
    cache.fork(parent.table, child.table)
    parent.append(50)
    cache.begin_step()
    plans = [parent.plan(), child.plan()]
    assert [plan[0] for plan in plans] == [1, 1]
    assert sorted(plan[1] for plan in plans) == [2, 3]
    assert cache.slots.num_free == 0
    cache.begin_step()
    assert cache.slots.num_free == 1
    cache.check_integrity(tables(parent, child))


def test_the_last_fork_writes_in_place_when_no_slot_is_free() -> None:
    cache = Cache(1)
    parent = Running(cache, range(3))
    assert parent.step() == (0, 1, 0, 0)
    child = parent.table.fork()
    cache.fork(parent.table, child)
    parent.append(50)
    assert not cache.slots.has_room(parent.table)
    cache.free(child)
    assert parent.step() == (1, 1, 0, 0)


def test_a_checkpoint_of_its_own_is_overwritten_when_no_slot_is_free() -> None:
    cache = Cache(2)
    one, two = Running(cache, range(4)), Running(cache, range(100, 104))
    assert (one.step(), two.step()) == ((0, 1, 0, 0), (0, 2, 0, 0))
    one.append(4)
    two.append(104)
    assert (one.step(), two.step()) == ((1, 1, 0, 0), (2, 2, 0, 0))
    assert cache.match([*range(5)]).num_tokens == 0
    cache.check_integrity(tables(one, two))


def test_admission_needs_a_slot() -> None:
    cache = Cache(1)
    one = Running(cache, range(3))
    one.step()
    table, ids = cache.new_table(3), list(range(50, 53))
    match = cache.match_prefix(table, ids, 2)
    assert cache.admit(table, match, 3) is None
    assert (table.is_empty, table.states and table.states.slot) == (True, 0)
    cache.free(one.table)
    assert cache.admit(table, match, 3) == []


def test_without_prefix_caching_checkpoints_serve_their_sequence() -> None:
    cache = Cache(6, prefix_caching=False)
    one = Running(cache, range(10))
    one.step()
    cache.begin_step()
    assert cache.match(list(range(10))).num_tokens == 0
    assert cache.rewind_states(one.table, one.ids) == 8
    cache.check_integrity(tables(one))


def test_reset_drops_checkpoints() -> None:
    cache = Cache(4)
    one = Running(cache, range(10))
    one.step()
    assert not cache.reset()
    cache.free(one.table)
    assert cache.reset()
    assert (cache.match(list(range(10))).num_tokens, cache.slots.num_free) == (0, 4)


def test_a_model_with_states_needs_a_slot() -> None:
    with pytest.raises(ValueError, match=r"at least one slot .* raise cache.state_slots"):
        KVCacheManager(8, 4, num_states=1)


def test_a_reserved_slot_is_taken_only_by_an_admitted_sequence() -> None:
    cache = Cache(2)
    one = Running(cache, range(8))
    assert one.step() == (0, 1, 2, 4)
    one.append(50)
    cache.slots.reserve()
    assert one.step() == (1, 1, 0, 0)  # the checkpoint after the second unit is overwritten
    assert cache.slots.num_free == 1
    other = Running(cache, range(20, 29))
    assert other.plan() == (0, 2, 0, 0)
    cache.check_integrity(tables(one, other))


def test_a_slot_that_the_last_step_left_is_unused() -> None:
    cache = Cache(3)
    one, other = Running(cache, range(8)), Running(cache, range(20, 29))
    assert (one.step(), other.plan()) == ((0, 1, 2, 4), (0, 3, 0, 0))
    assert (cache.slots.num_free, cache.slots.num_unused) == (0, 1)
    cache.begin_step()
    assert (cache.slots.num_free, cache.slots.num_unused) == (1, 1)
