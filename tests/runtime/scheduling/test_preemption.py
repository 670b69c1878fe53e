"""Scheduler: preemption for lack of rows or blocks, and steps in flight. Blocks hold 4 tokens."""

from __future__ import annotations

import pytest

from ostinato.conf.schema import SchedulingPolicy
from ostinato.models.kv_groups import KVGroup
from ostinato.runtime.engine.engine_counters import EngineCounters
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.step import (
    AdmittedSequence,
    ScheduledSequence,
    StepResult,
)
from tests.runtime.scheduling.scheduler_steps import (
    EOS,
    chunks,
    make_request,
    make_scheduler,
    must_schedule,
    step,
)

# --- memory ---------------------------------------------------------------------------------------


def test_a_prompt_leaves_the_blocks_of_a_window_after_its_first_token() -> None:
    """While the prompt is computed, a group with a window has blocks for all of its chunk."""
    request = make_request("a", range(3, 36), ignore_eos=True)
    groups = (KVGroup(0, 2, 1), KVGroup(8, 1, 2))
    scheduler = make_scheduler(request, num_blocks=30, groups=groups)
    step(scheduler, 7)
    assert scheduler.queues.cache.num_free_blocks == 30 - 5 - 9
    step(scheduler, 7)
    # The token at 33 can be repeated from 25 on, which reads from 18 on: blocks of 16 to 35.
    assert scheduler.queues.cache.num_free_blocks == 30 - 5 - 5


def test_a_prompt_that_does_not_fit_as_a_whole_waits() -> None:
    scheduler = make_scheduler(
        make_request("a", range(10, 30)),
        make_request("b", range(50, 70)),
        num_blocks=10,
        max_num_batched_tokens=8,
    )
    assert chunks(step(scheduler)) == [(0, 0, 8)]
    assert chunks(step(scheduler)) == [(0, 8, 8)]
    # The step has room for 4 more tokens, and 5 blocks are left. `b` needs all 5, but one is kept
    # for the sequence ahead.
    assert chunks(step(scheduler, 5)) == [(0, 16, 4)]
    assert scheduler.num_waiting == 1


def test_the_last_sequence_gives_way_and_comes_back_with_its_output() -> None:
    first = make_request("a", range(10, 18), max_tokens=30)
    second = make_request("b", range(30, 38), max_tokens=30)
    scheduler = make_scheduler(first, second, num_blocks=10)
    for token_id in range(40, 53):
        step(scheduler, token_id, token_id + 40)
    # Both hold 20 computed tokens in 5 blocks, and both need a sixth.
    output = must_schedule(scheduler)
    assert chunks(output) == [(0, 20, 1)]
    assert output.scheduled[0].new_block_ids == [10]
    assert (scheduler.num_preemptions, scheduler.num_running, scheduler.num_waiting) == (1, 1, 1)
    assert scheduler.update(output, StepResult([53])) == [SequenceOutput("a", [53])]
    scheduler.abort("a")
    output = must_schedule(scheduler)
    assert output.admitted == [AdmittedSequence(0, second, list(range(80, 93)), is_resumed=True)]
    # It held blocks 3, 4, 6, 8 and 10. Four are still cached; block 10 went to the other sequence.
    assert output.scheduled == [
        ScheduledSequence(0, 16, 5, [88, 89, 90, 91, 92], [3, 4, 6, 8, 10, 9], 1)
    ]
    assert scheduler.update(output, StepResult([93])) == [SequenceOutput("b", [93])]
    scheduler.check_integrity()


def test_a_preempted_sequence_is_back_before_later_arrivals() -> None:
    scheduler = make_scheduler(
        make_request("a", range(10, 18), max_tokens=30),
        make_request("b", range(30, 38), max_tokens=30),
        num_blocks=10,
    )
    for token_id in range(40, 53):
        step(scheduler, token_id, token_id + 40)
    scheduler.add(make_request("c", [90]))
    step(scheduler, 53)
    scheduler.abort("a")
    admitted = [entry.request.request_id for entry in must_schedule(scheduler).admitted]
    assert admitted == ["b", "c"]


def test_a_more_urgent_request_takes_the_row_of_the_least_urgent() -> None:
    scheduler = make_scheduler(
        make_request("a", [10], priority=1),
        make_request("b", [11], priority=2),
        max_num_seqs=2,
        policy=SchedulingPolicy.priority,
    )
    step(scheduler, 5, 6)
    urgent = make_request("c", [12], priority=0)
    scheduler.add(urgent)
    output = must_schedule(scheduler)
    assert output.admitted == [AdmittedSequence(1, urgent, [])]
    assert chunks(output) == [(1, 0, 1), (0, 1, 1)]
    assert (scheduler.num_preemptions, scheduler.num_waiting) == (1, 1)


def test_the_queue_time_of_a_sequence_counts_once() -> None:
    """A sequence that is preempted before its first token is not counted again when it resumes."""
    late = make_request("b", range(30, 50), priority=2)
    scheduler = make_scheduler(
        make_request("a", [10], priority=1),
        late,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        policy=SchedulingPolicy.priority,
    )
    counters = EngineCounters()
    first = must_schedule(scheduler)
    counters.admit(first)
    assert len(first.admitted) == counters.num_admitted == 2
    waited = counters.queue_seconds
    scheduler.update(first, StepResult([5]))
    scheduler.add(make_request("c", [12], priority=0))
    counters.admit(step(scheduler, 6, 7))
    assert (scheduler.num_preemptions, counters.num_admitted) == (1, 3)
    waited_by_c = counters.queue_seconds - waited
    scheduler.abort("c")
    resumed = must_schedule(scheduler)
    assert resumed.admitted == [AdmittedSequence(1, late, [], is_resumed=True)]
    counters.admit(resumed)
    assert counters.num_admitted == 3
    assert counters.queue_seconds == waited + waited_by_c


def test_a_more_urgent_request_takes_the_blocks_of_the_least_urgent() -> None:
    scheduler = make_scheduler(
        make_request("a", range(10, 22), priority=1),
        make_request("b", range(30, 42), priority=2),
        num_blocks=10,
        policy=SchedulingPolicy.priority,
    )
    step(scheduler, 5, 6)
    scheduler.add(make_request("c", range(50, 70), priority=0))
    output = step(scheduler, 7, 8)
    assert chunks(output) == [(1, 0, 20), (0, 12, 1)]
    assert (scheduler.num_preemptions, scheduler.num_running) == (1, 2)


def test_no_sequence_is_preempted_when_it_would_not_suffice() -> None:
    scheduler = make_scheduler(
        make_request("a", range(10, 30), priority=0),
        make_request("b", range(30, 38), priority=2),
        num_blocks=10,
        policy=SchedulingPolicy.priority,
    )
    step(scheduler, 5, 6)
    scheduler.add(make_request("c", range(50, 74), priority=1))  # needs 6; `a` holds all but 5
    step(scheduler, 7, 8)
    assert (scheduler.num_preemptions, scheduler.num_running, scheduler.num_waiting) == (0, 2, 1)


def test_a_cache_that_can_not_hold_one_sequence_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"max_model_len=41 tokens needs 11 blocks, but the KV cache has 10"
    ):
        make_scheduler(num_blocks=10, max_model_len=41)
    make_scheduler(num_blocks=10, max_model_len=40)


# --- one step ahead -------------------------------------------------------------------------------


def test_a_step_ahead_reads_tokens_that_have_not_arrived() -> None:
    scheduler = make_scheduler(make_request("a", [10, 11, 12], max_tokens=3))
    first = must_schedule(scheduler)
    second = must_schedule(scheduler)
    assert second.scheduled == [ScheduledSequence(0, 3, 1, [], [], 1)]
    assert scheduler.update(first, StepResult([5])) == [SequenceOutput("a", [5])]
    third = must_schedule(scheduler)
    assert third.scheduled == [ScheduledSequence(0, 4, 1, [], [2], 1)]
    assert scheduler.update(second, StepResult([6])) == [SequenceOutput("a", [6])]
    assert scheduler.schedule() is None  # the third token is the last: nothing is computed in vain
    assert scheduler.has_work
    assert scheduler.update(third, StepResult([7])) == [
        SequenceOutput("a", [7], FinishReason.length)
    ]
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_what_a_stopped_sequence_computed_ahead_is_dropped() -> None:
    scheduler = make_scheduler(make_request("a", [10, 11, 12]), max_num_seqs=1)
    first = must_schedule(scheduler)
    second = must_schedule(scheduler)
    scheduler.add(make_request("b", [20]))
    assert scheduler.update(first, StepResult([EOS])) == [
        SequenceOutput("a", [EOS], FinishReason.stop)
    ]
    assert scheduler.schedule() is None  # its row is still part of the second step
    assert scheduler.update(second, StepResult([99])) == []
    third = must_schedule(scheduler)
    assert [(entry.row, entry.request.request_id) for entry in third.admitted] == [(0, "b")]
    assert scheduler.num_output_tokens == 1


def test_an_aborted_sequence_keeps_its_row_until_its_steps_are_back() -> None:
    scheduler = make_scheduler(make_request("a", [10, 11, 12]), max_num_seqs=1)
    first = must_schedule(scheduler)
    second = must_schedule(scheduler)
    assert scheduler.abort("a") == SequenceOutput("a", [], FinishReason.abort)
    scheduler.add(make_request("a", [20]))  # the id is free again
    assert scheduler.update(first, StepResult([5])) == []
    assert scheduler.schedule() is None
    assert scheduler.update(second, StepResult([6])) == []
    third = must_schedule(scheduler)
    assert scheduler.update(third, StepResult([7])) == [SequenceOutput("a", [7])]
    scheduler.check_integrity()


def test_a_sequence_preempted_in_flight_keeps_the_token_that_is_on_its_way() -> None:
    scheduler = make_scheduler(
        make_request("a", range(10, 18), max_tokens=30),
        make_request("b", range(30, 38), max_tokens=30),
        num_blocks=10,
    )
    ahead = must_schedule(scheduler)
    for token_id in range(40, 52):
        latest = must_schedule(scheduler)
        scheduler.update(ahead, StepResult([token_id, token_id + 40]))
        ahead = latest
    # Position 20 of both needs a block: b gives way, but its blocks are in use until `ahead` is
    # back.
    assert scheduler.schedule() is None
    assert (scheduler.num_preemptions, scheduler.num_running, scheduler.num_waiting) == (1, 1, 1)
    assert scheduler.update(ahead, StepResult([52, 92])) == [
        SequenceOutput("a", [52]),
        SequenceOutput("b", [92]),
    ]
    assert chunks(step(scheduler, 53)) == [(0, 20, 1)]
    scheduler.abort("a")
    resumed = must_schedule(scheduler)
    assert resumed.admitted[0].output_token_ids == list(range(80, 93))
    assert chunks(resumed) == [(0, 16, 5)]


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(100, 2), (10, 4)])
def test_no_sequence_is_preempted_for_blocks_that_become_free_anyway(
    num_blocks: int, max_num_seqs: int
) -> None:
    """An urgent request needs a row or blocks. An aborted request frees them at the next update."""
    scheduler = make_scheduler(
        make_request("a", range(10, 22), priority=1),
        make_request("b", range(30, 42), priority=2),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        policy=SchedulingPolicy.priority,
    )
    ahead = must_schedule(scheduler)
    scheduler.abort("b")
    scheduler.add(make_request("c", range(50, 70), priority=0))
    latest = must_schedule(scheduler)
    assert chunks(latest) == [(0, 12, 1)]
    scheduler.update(ahead, StepResult([5, 6]))
    assert chunks(must_schedule(scheduler)) == [(1, 0, 20), (0, 13, 1)]
    assert scheduler.num_preemptions == 0
    scheduler.check_integrity()


def test_at_most_two_steps_are_in_flight() -> None:
    scheduler = make_scheduler(make_request("a", [10]))
    must_schedule(scheduler)
    must_schedule(scheduler)
    with pytest.raises(RuntimeError, match=r"2 steps are in flight; call update\(\)"):
        scheduler.schedule()


def test_results_come_in_order() -> None:
    scheduler = make_scheduler(make_request("a", [10]))
    first = must_schedule(scheduler)
    second = must_schedule(scheduler)
    with pytest.raises(ValueError, match="oldest step in flight"):
        scheduler.update(second, StepResult([5]))
    scheduler.update(first, StepResult([5]))
    with pytest.raises(ValueError, match="oldest step in flight"):
        scheduler.update(first, StepResult([5]))


def test_a_result_has_a_token_for_each_entry_that_samples() -> None:
    scheduler = make_scheduler(make_request("a", [10]), make_request("b", [11]))
    output = must_schedule(scheduler)
    with pytest.raises(ValueError, match="samples 2 tokens, but its result has 1 tokens"):
        scheduler.update(output, StepResult([5]))
    assert len(scheduler.update(output, StepResult([5, 6]))) == 2


def test_no_sequence_gives_way_for_blocks_that_the_other_one_needs_again() -> None:
    """Four of the five blocks that `low` would free are the cached prefix of `high`."""
    scheduler = make_scheduler(
        make_request("first", range(60, 68), priority=0),
        make_request("low", range(10, 26), priority=2),
        num_blocks=12,
        max_model_len=36,
        policy=SchedulingPolicy.priority,
    )
    step(scheduler, 40, 50)
    scheduler.add(make_request("high", range(10, 44), priority=1))
    assert chunks(step(scheduler, 41, 51)) == [(0, 8, 1), (1, 16, 1)]
    assert (scheduler.num_preemptions, scheduler.num_running, scheduler.num_waiting) == (0, 2, 1)
    scheduler.abort("first")
    step(scheduler, 42, 52)
    running = [one.request.request_id for one in scheduler.queues.running]
    assert running == ["high", "low"]
