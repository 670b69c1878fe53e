"""The scheduler with recurrent layers: a sequence's state is always that of its own tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from ostinato.conf.schema import SchedulingPolicy
from ostinato.models.kv_groups import sequence_blocks
from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.kv.block_table import BlockTable
from ostinato.runtime.kv.state_slots import FoundStates, StateSlots
from ostinato.runtime.types.step import StepResult
from tests.pairwise import all_combinations
from tests.runtime.drafters import OracleDrafter
from tests.runtime.scheduling.engine_machine import (
    MAX_MODEL_LEN,
    POLICIES,
    EngineMachine,
    kv_groups,
)
from tests.runtime.scheduling.mixed_workload import plain_tokens, run_workload
from tests.runtime.scheduling.scheduler_steps import (
    chunks,
    make_request,
    make_scheduler,
    must_schedule,
    step,
)
from tests.runtime.simulated_device import VOCAB_SIZE
from tests.runtime.simulated_engine import SimulatedEngine


@st.composite
def recurrent_engines(draw: st.DrawFn) -> SimulatedEngine:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    max_num_seqs = draw(st.integers(1, 6))
    groups = draw(kv_groups())
    step_tokens = max_num_seqs + draw(st.integers(0, 24))
    least_blocks = sequence_blocks(groups, block_size, MAX_MODEL_LEN, step_tokens) + 1
    accuracy = draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
    return SimulatedEngine(
        total_blocks=least_blocks + draw(st.integers(0, 20)),
        block_size=block_size,
        groups=groups,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        max_model_len=MAX_MODEL_LEN,
        policy=draw(st.sampled_from(POLICIES)),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        num_lanes=draw(st.sampled_from([1, 1, 2, 3])) if accuracy is None else 1,
        drafter=None if accuracy is None else OracleDrafter(accuracy, VOCAB_SIZE),
        hold_seed=draw(st.sampled_from([None, 1, 2, 3])),
        # The least is one usable slot.
        num_states=draw(st.sampled_from([2, 3, max_num_seqs + 2, 2 * max_num_seqs + 1, 40])),
    )


class RecurrentMachine(EngineMachine):
    @initialize(engine=recurrent_engines())
    def start(self, engine: SimulatedEngine) -> None:
        self.engine = engine


TestRecurrentMachine = RecurrentMachine.TestCase
TestRecurrentMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("num_states", "total_blocks", "prefix_caching", "hold_seed", "num_lanes"),
    all_combinations((3, 10, 40), (25, 200), (True, False), (None, 1), (1, 3)),
)
def test_tokens_do_not_depend_on_slots(
    num_states: int,
    total_blocks: int,
    prefix_caching: bool,
    hold_seed: int | None,
    num_lanes: int,
) -> None:
    engine = run_workload(
        lookahead=True,
        total_blocks=total_blocks,
        max_num_batched_tokens=64,
        prefix_caching=prefix_caching,
        hold_seed=hold_seed,
        num_lanes=num_lanes,
        num_states=num_states,
    )
    assert engine.tokens == plain_tokens()


@pytest.mark.parametrize(
    ("num_states", "hold_seed", "accuracy", "lookahead"),
    all_combinations((3, 10, 40), (None, 1), (0.0, 0.6, 0.9, 1.0), (False, True)),
)
def test_drafts_change_no_token(
    num_states: int, hold_seed: int | None, accuracy: float, lookahead: bool
) -> None:
    engine = run_workload(
        lookahead=lookahead,
        total_blocks=200,
        block_size=8,
        max_num_batched_tokens=64,
        hold_seed=hold_seed,
        num_states=num_states,
        accuracy=accuracy,
    )
    assert engine.tokens == plain_tokens()
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    # With two usable slots, running sequences leave no slot for drafts.
    assert (stats.num_drafts > 0) == (num_states > 3)
    assert (stats.num_accepted_tokens > 0) == (num_states > 3 and accuracy > 0)


def test_states_go_back_behind_refused_drafts() -> None:
    requests = [make_request("r", range(5))]
    drafter = OracleDrafter(1.0, 100)
    drafter.outputs["r"] = [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40]
    scheduler = make_scheduler(*requests, block_size=16, num_states=9, proposer=drafter)
    step(scheduler, 30)
    output = must_schedule(scheduler)
    assert chunks(output) == [(0, 5, 8)]
    ((own, after, before, at),) = [entry.state_slots for entry in output.scheduled]
    assert (before, at) == (own, 1)
    assert after != own
    # Two drafts were right, and the third was not. The tokens of the two are computed again.
    scheduler.update(output, StepResult([31, 32, 70], counts=[3]))
    drafter.outputs["r"] = [30, 31, 32, 70, 71, 72, 73, 74, 75, 76, 77]
    output = must_schedule(scheduler)
    assert chunks(output) == [(0, 6, 3)]
    assert output.scheduled[0].token_ids == [31, 32, 70]
    assert output.scheduled[0].state_slots == (own, own, 0, 0)
    scheduler.update(output, StepResult([71]))
    # The next drafts end with their unit. No draft is right, so no token is computed again.
    output = must_schedule(scheduler)
    assert chunks(output) == [(0, 9, 7)]
    scheduler.update(output, StepResult([60], counts=[1]))
    drafter.outputs["r"] = [30, 31, 32, 70, 71, 60, *range(80, 90)]
    output = must_schedule(scheduler)
    assert chunks(output) == [(0, 10, 6)]
    scheduler.update(output, StepResult([*range(80, 86)], counts=[6]))
    # All were right, and the unit is full: its states are kept, and the next step leaves them.
    output = must_schedule(scheduler)
    assert chunks(output) == [(0, 16, 1)]
    slots = output.scheduled[0].state_slots
    assert slots is not None
    assert slots[0] != slots[1]
    scheduler.check_integrity()


def test_the_workload_meets_what_it_is_for() -> None:
    """Shortage of slots, evicted checkpoints, hits, and steps that are repeated from a checkpoint."""
    tight = run_workload(
        lookahead=True, total_blocks=200, max_num_batched_tokens=64, hold_seed=1, num_states=4
    )
    ample = run_workload(
        lookahead=True, total_blocks=200, max_num_batched_tokens=64, hold_seed=1, num_states=80
    )
    assert tight.cache.states is not None
    assert ample.cache.states is not None
    assert tight.device.states is not None
    assert tight.scheduler.num_preemptions > 50
    assert tight.cache.states.num_evictions > 100
    assert tight.device.states.num_checkpoints > 50
    assert ample.scheduler.num_preemptions < 15  # those for rows, and a few holds
    assert ample.cache.prefix_hits > 100


def test_prompts_that_begin_alike_wait_one_step_for_the_states_of_the_first() -> None:
    requests = [make_request(f"r{index}", [*range(9), 20 + index]) for index in range(3)]
    scheduler = make_scheduler(*requests, num_states=9)
    assert chunks(step(scheduler, 30)) == [(0, 0, 10)]
    assert chunks(step(scheduler, 31, 32, 33)) == [(0, 10, 1), (1, 8, 2), (2, 8, 2)]


def test_a_step_without_a_token_is_repeated_from_a_checkpoint() -> None:
    scheduler = make_scheduler(make_request("r", range(10)), num_states=9)
    first = must_schedule(scheduler)
    ahead = must_schedule(scheduler)  # planned as if the first gave a token
    scheduler.update(first, StepResult([], counts=[0]))
    assert scheduler.schedule() is None
    scheduler.update(ahead, StepResult([], counts=[0]))
    repeated = step(scheduler, 30)
    assert chunks(repeated) == [(0, 8, 2)]
    assert repeated.scheduled[0].token_ids == [8, 9]
    assert scheduler.num_preemptions == 0
    assert chunks(step(scheduler, 31)) == [(0, 10, 1)]


def test_a_sequence_that_cannot_go_back_is_preempted() -> None:
    """The second one has the blocks of the first, and the states before them are lost."""
    requests = [make_request("a", range(10)), make_request("b", range(10))]
    scheduler = make_scheduler(*requests, num_states=9)
    step(scheduler, 30)
    output = must_schedule(scheduler)
    assert chunks(output) == [(0, 10, 1), (1, 8, 2)]
    states = scheduler._cache.states
    assert states is not None
    states._pool.forget_cached()
    scheduler.update(output, StepResult([31], counts=[1, 0]))
    scheduler.check_integrity()
    assert (scheduler.num_preemptions, scheduler.num_waiting) == (1, 1)
    assert chunks(step(scheduler, 32, 33)) == [(0, 11, 1), (1, 0, 10)]


def test_a_waiting_sequence_takes_the_slot_of_one_behind_it() -> None:
    low, high = make_request("low", range(5), priority=1), make_request("high", range(20, 25))
    scheduler = make_scheduler(low, num_states=2, policy=SchedulingPolicy.priority)
    step(scheduler, 30)
    scheduler.add(high)
    output = step(scheduler, 31)
    assert [admitted.request.request_id for admitted in output.admitted] == ["high"]
    assert (scheduler.num_preemptions, scheduler.num_waiting) == (1, 1)


def test_decodes_leave_a_slot_to_a_waiting_sequence() -> None:
    """In each step a quarter of the decodes reads a checkpoint, and could write to a new slot."""
    requests = [
        make_request(f"r{index}", [100 * index + at for at in range(5 + index % 4)])
        for index in range(24)
    ]
    scheduler = make_scheduler(
        *requests, num_blocks=400, max_num_seqs=24, max_num_batched_tokens=400, num_states=26
    )
    for _ in range(12):
        output = must_schedule(scheduler)
        scheduler.update(output, StepResult([30] * output.num_seqs))
        scheduler.check_integrity()
    assert (scheduler.num_running, scheduler.num_preemptions) == (24, 0)


def free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot that a sequence leaves can be written in the same step."""
    original = StateSlots._leave

    def leave(slots: StateSlots, slot: int) -> int:
        new = original(slots, slot)
        slots._pool.free(slots._leaving)
        slots._leaving.clear()
        return new

    monkeypatch.setattr(StateSlots, "_leave", leave)


def find_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are found in the step that writes them."""
    original = StateSlots.find

    def find(slots: StateSlots, hashes: list[BlockHash], num_units: int) -> FoundStates:
        slots._fresh.clear()
        return original(slots, hashes, num_units)

    monkeypatch.setattr(StateSlots, "find", find)


def register_held_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states after a token that a step did not give are found by the token that comes later."""
    rewind, settle = StateSlots.rewind, StateSlots.settle
    void: dict[int, tuple[int, int]] = {}  # by table: units and slot

    def faulty_rewind(
        slots: StateSlots, table: BlockTable, token_ids: list[int], least: int
    ) -> int | None:
        assert table.states is not None
        if table.states.pending:
            void[id(table)] = table.states.pending, table.states.slot
            slots._pool.touch([table.states.slot])
        return rewind(slots, table, token_ids, least)

    def faulty_settle(slots: StateSlots, table: BlockTable, token_ids: list[int]) -> bool:
        units, slot = void.get(id(table), (0, 0))
        if units and units * slots._block_size <= len(token_ids):
            table.hash_up_to(token_ids, units, slots._block_size)
            slots._pool.register(slot, table.hashes[units - 1])
            slots._pool.free([slot])
            del void[id(table)]
        return settle(slots, table, token_ids)

    monkeypatch.setattr(StateSlots, "rewind", faulty_rewind)
    monkeypatch.setattr(StateSlots, "settle", faulty_settle)
    monkeypatch.setattr(StateSlots, "check_integrity", lambda *args: None)


def write_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that other sequences read, or that lookups find, are overwritten."""
    original = StateSlots._leave
    monkeypatch.setattr(StateSlots, "_leave", lambda slots, slot: slot or original(slots, slot))


def write_forks_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams overwrite the states that they share."""
    original = StateSlots.__init__

    def init(slots: StateSlots, total_slots: int, block_size: int) -> None:
        original(slots, total_slots, block_size)
        monkeypatch.setattr(slots._pool, "ref_count", lambda slot: 1)

    monkeypatch.setattr(StateSlots, "__init__", init)


def repeat_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is repeated with the states that it has changed."""
    monkeypatch.setattr(
        StateSlots, "rewind", lambda slots, table, token_ids, least: len(token_ids) - 1
    )


def keep_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that ends keeps its slot."""

    def release(slots: StateSlots, table: BlockTable) -> None:
        assert table.states is not None
        table.states.slot = 0

    monkeypatch.setattr(StateSlots, "release", release)


OTHER_TOKENS = "has the states of other tokens"
TWO_USERS = "is read by a row and written by another"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (free_at_once, TWO_USERS),
        (find_at_once, OTHER_TOKENS),
        (register_held_token, OTHER_TOKENS),
        (write_in_place, f"two writes to slot|{OTHER_TOKENS}"),
        (write_forks_in_place, TWO_USERS),
        (repeat_in_place, OTHER_TOKENS),
        (keep_slots, "1 references and is in 0 tables"),
    ],
)
def test_the_simulation_finds_faults(
    fault: Callable[[pytest.MonkeyPatch], None], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=error):
        run_workload(
            lookahead=True,
            total_blocks=200,
            max_num_batched_tokens=64,
            hold_seed=1,
            num_states=17,
        )
