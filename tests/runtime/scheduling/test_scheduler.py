"""Scheduler: what is planned and what is answered, as literals. Blocks hold 4 tokens here."""

from __future__ import annotations

import pytest

from ostinato.conf.schema import SchedulerConfig, SchedulingPolicy
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput, TokenLogprobs
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import (
    AdmittedSequence,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)

EOS = 2


def make_request(
    request_id: str,
    prompt: range | list[int],
    *,
    priority: int = 0,
    max_tokens: int | None = 20,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=sampling,
        eos_token_ids=(EOS,),
        priority=priority,
    )


def make_scheduler(
    *requests: Request,
    num_blocks: int = 100,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 40,
    policy: SchedulingPolicy = SchedulingPolicy.fcfs,
    prefix_caching: bool = True,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=policy,
    )
    cache = KVCacheManager(num_blocks + 1, 4, enable_prefix_caching=prefix_caching)
    scheduler = Scheduler(config, cache, max_model_len=max_model_len)
    for request in requests:
        scheduler.add(request)
    return scheduler


def must_schedule(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    return output


def step(scheduler: Scheduler, *token_ids: int) -> SchedulerOutput:
    """Schedule a step and give it these tokens."""
    output = must_schedule(scheduler)
    scheduler.update(output, StepResult(list(token_ids)))
    scheduler.check_integrity()
    return output


def chunks(output: SchedulerOutput) -> list[tuple[int, int, int]]:
    """(row, start, num_new_tokens) of each entry."""
    return [(entry.row, entry.start, entry.num_new_tokens) for entry in output.scheduled]


# --- one sequence ---------------------------------------------------------------------------------


def test_one_request_from_prompt_to_end() -> None:
    request = make_request("a", [11, 12, 13, 14, 15], max_tokens=3)
    scheduler = make_scheduler(request)
    first = must_schedule(scheduler)
    assert first == SchedulerOutput(
        scheduled=[ScheduledSequence(0, 0, 5, [11, 12, 13, 14, 15], [1, 2], 1)],
        admitted=[AdmittedSequence(0, request, [])],
        num_tokens=5,
    )
    assert scheduler.update(first, StepResult([21])) == [SequenceOutput("a", [21])]
    second = must_schedule(scheduler)
    assert second == SchedulerOutput([ScheduledSequence(0, 5, 1, [], [], 1)], [], 1)
    assert scheduler.update(second, StepResult([22])) == [SequenceOutput("a", [22])]
    third = must_schedule(scheduler)
    assert third == SchedulerOutput([ScheduledSequence(0, 6, 1, [], [], 1)], [], 1)
    assert scheduler.update(third, StepResult([23])) == [
        SequenceOutput("a", [23], FinishReason.length)
    ]
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    assert (scheduler.num_prompt_tokens, scheduler.num_output_tokens) == (5, 3)
    scheduler.check_integrity()


def test_decoding_takes_a_block_when_the_last_one_is_full() -> None:
    scheduler = make_scheduler(make_request("a", range(10, 13)))
    blocks = [step(scheduler, 5).scheduled[0].new_block_ids for _ in range(7)]
    assert blocks == [[1], [], [2], [], [], [], [3]]


def test_log_probabilities_go_with_their_token() -> None:
    scheduler = make_scheduler(make_request("a", [10]), make_request("b", [11]))
    logprob = TokenLogprobs(-0.5, 1, [7], [-0.5])
    outputs = scheduler.update(must_schedule(scheduler), StepResult([7, 8], [logprob, None]))
    assert outputs == [SequenceOutput("a", [7], logprobs=[logprob]), SequenceOutput("b", [8])]


# --- ends -----------------------------------------------------------------------------------------


def ending(request: Request, *token_ids: int, max_model_len: int = 40) -> SequenceOutput:
    """The last output of a request that samples these tokens."""
    scheduler = make_scheduler(request, max_model_len=max_model_len)
    outputs = SequenceOutput("", [])
    for token_id in token_ids:
        assert outputs.finish_reason is None, "it ended too early"
        [outputs] = scheduler.update(must_schedule(scheduler), StepResult([token_id]))
    return outputs


def test_end_of_sequence() -> None:
    outputs = ending(make_request("a", [10]), 5, EOS)
    assert outputs == SequenceOutput("a", [EOS], FinishReason.stop, stop_reason=None)


def test_end_of_sequence_ignored() -> None:
    outputs = ending(make_request("a", [10], ignore_eos=True, max_tokens=3), EOS, EOS, EOS)
    assert outputs == SequenceOutput("a", [EOS], FinishReason.length)


def test_stop_token() -> None:
    outputs = ending(make_request("a", [10], stop_token_ids=(7, 8)), 5, 8)
    assert outputs == SequenceOutput("a", [8], FinishReason.stop, stop_reason=8)


def test_an_ignored_end_of_sequence_may_be_a_stop_token() -> None:
    request = make_request("a", [10], ignore_eos=True, stop_token_ids=(EOS,))
    assert ending(request, EOS) == SequenceOutput("a", [EOS], FinishReason.stop, stop_reason=EOS)


def test_no_stop_before_min_tokens() -> None:
    request = make_request("a", [10], min_tokens=3, stop_token_ids=(7,))
    assert ending(request, 7, EOS, 7) == SequenceOutput("a", [7], FinishReason.stop, stop_reason=7)


def test_stop_wins_over_length() -> None:
    outputs = ending(make_request("a", [10], max_tokens=2), 5, EOS)
    assert outputs.finish_reason is FinishReason.stop


def test_the_context_ends_a_request_without_max_tokens() -> None:
    outputs = ending(make_request("a", [10, 11], max_tokens=None), 5, 6, 7, max_model_len=5)
    assert outputs == SequenceOutput("a", [7], FinishReason.length)


def test_the_context_ends_a_request_before_its_max_tokens() -> None:
    outputs = ending(make_request("a", [10, 11], max_tokens=9), 5, 6, max_model_len=4)
    assert outputs == SequenceOutput("a", [6], FinishReason.length)


# --- budget, rows, order
# ---------------------------------------------------------------------------


def test_a_long_prompt_is_cut_to_the_budget() -> None:
    request = make_request("a", range(10, 30))
    scheduler = make_scheduler(request, max_num_batched_tokens=8)
    first = step(scheduler)
    assert first.scheduled == [ScheduledSequence(0, 0, 8, list(range(10, 18)), [1, 2, 3, 4, 5], 0)]
    assert step(scheduler).scheduled == [ScheduledSequence(0, 8, 8, list(range(18, 26)), [], 0)]
    assert step(scheduler, 5).scheduled == [ScheduledSequence(0, 16, 4, list(range(26, 30)), [], 1)]
    assert chunks(step(scheduler, 5)) == [(0, 20, 1)]


def test_prefill_and_decode_share_one_step() -> None:
    scheduler = make_scheduler(make_request("a", range(10, 13)), max_num_batched_tokens=8)
    step(scheduler, 5)
    scheduler.add(make_request("b", range(20, 40)))
    output = step(scheduler, 6)
    assert chunks(output) == [(0, 3, 1), (1, 0, 7)]
    assert [entry.num_logits for entry in output.scheduled] == [1, 0]
    assert (output.num_tokens, output.num_seqs) == (8, 2)
    assert chunks(step(scheduler, 7)) == [(0, 4, 1), (1, 7, 7)]
    assert chunks(step(scheduler, 8, 9)) == [(0, 5, 1), (1, 14, 6)]


def test_requests_are_admitted_in_order_of_arrival_while_tokens_last() -> None:
    prompts = {"a": range(10, 15), "b": range(20, 25), "c": range(30, 35)}
    requests = [make_request(name, prompt) for name, prompt in prompts.items()]
    scheduler = make_scheduler(*requests, max_num_batched_tokens=8)
    first = step(scheduler, 5)
    assert [admitted.request.request_id for admitted in first.admitted] == ["a", "b"]
    assert chunks(first) == [(0, 0, 5), (1, 0, 3)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    second = step(scheduler, 5, 5, 5)
    assert chunks(second) == [(0, 5, 1), (1, 3, 2), (2, 0, 5)]


def test_a_full_house_makes_the_next_one_wait_for_the_lowest_free_row() -> None:
    names = "abcd"
    scheduler = make_scheduler(
        *(make_request(name, [ord(name)], max_tokens=2) for name in names), max_num_seqs=3
    )
    assert chunks(step(scheduler, 5, EOS, 5)) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    last = must_schedule(scheduler)
    assert chunks(last) == [(0, 1, 1), (2, 1, 1), (1, 0, 1)]
    assert [admitted.row for admitted in last.admitted] == [1]


def test_a_decoding_sequence_behind_a_long_prefill_is_not_stalled() -> None:
    """Priority puts a long prompt ahead of a stream, which still gets its token of every step."""
    scheduler = make_scheduler(
        make_request("low", [10], priority=1),
        max_num_batched_tokens=8,
        policy=SchedulingPolicy.priority,
    )
    step(scheduler, 5)
    scheduler.add(make_request("high", range(20, 40), priority=0))
    assert chunks(step(scheduler, 6)) == [(1, 0, 7), (0, 1, 1)]
    assert chunks(step(scheduler, 7)) == [(1, 7, 7), (0, 2, 1)]
    assert chunks(step(scheduler, 8, 9)) == [(1, 14, 6), (0, 3, 1)]


def test_priority_orders_the_queue_then_arrival_does() -> None:
    scheduler = make_scheduler(
        *(
            make_request(name, [ord(name)], priority=priority)
            for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0))
        ),
        max_num_seqs=3,
        policy=SchedulingPolicy.priority,
    )
    admitted = [entry.request.request_id for entry in step(scheduler, 5, 5, 5).admitted]
    assert admitted == ["b", "d", "c"]


def test_first_come_first_served_ignores_priority() -> None:
    scheduler = make_scheduler(
        make_request("a", [10], priority=5), make_request("b", [11], priority=0), max_num_seqs=1
    )
    assert step(scheduler, 5).admitted[0].request.request_id == "a"


# --- prefix sharing
# ---------------------------------------------------------------------------------


def test_equal_prompts_of_one_step_share_all_full_blocks() -> None:
    """As `n` completions of one prompt do: the second and third compute its last token only."""
    prompt = list(range(10, 18))
    scheduler = make_scheduler(*(make_request(name, prompt) for name in "abc"))
    output = must_schedule(scheduler)
    assert output.scheduled == [
        ScheduledSequence(0, 0, 8, prompt, [1, 2], 1),
        ScheduledSequence(1, 4, 4, [14, 15, 16, 17], [1, 3], 1),
        ScheduledSequence(2, 4, 4, [14, 15, 16, 17], [1, 4], 1),
    ]
    assert [
        outputs.num_cached_tokens for outputs in scheduler.update(output, StepResult([5, 6, 7]))
    ] == [
        0,
        4,
        4,
    ]
    assert scheduler.num_prompt_tokens == 16
    scheduler.check_integrity()


def test_a_chunk_of_a_prompt_can_be_shared_before_the_rest_is_computed() -> None:
    scheduler = make_scheduler(make_request("a", range(10, 26)), max_num_batched_tokens=10)
    step(scheduler)
    scheduler.add(make_request("b", [*range(10, 18), 90]))
    output = must_schedule(scheduler)
    assert output.scheduled == [
        ScheduledSequence(0, 10, 6, list(range(20, 26)), [], 1),
        ScheduledSequence(1, 8, 1, [90], [1, 2, 5], 1),
    ]


def test_cached_tokens_are_reported_with_the_first_token_only() -> None:
    scheduler = make_scheduler(make_request("a", range(10, 19), max_tokens=1))
    step(scheduler, 5)
    scheduler.add(make_request("b", range(10, 19)))
    cached = [
        scheduler.update(must_schedule(scheduler), StepResult([token_id]))[0].num_cached_tokens
        for token_id in (5, 6)
    ]
    assert cached == [8, 0]


def test_a_follow_up_finds_the_output_of_the_turn_before() -> None:
    scheduler = make_scheduler(make_request("a", range(10, 16), max_tokens=4))
    for token_id in (50, 51, 52, 53):
        step(scheduler, token_id)
    scheduler.add(make_request("b", [*range(10, 16), 50, 51, 52, 53, 60]))
    assert must_schedule(scheduler).scheduled == [
        ScheduledSequence(0, 8, 3, [52, 53, 60], [1, 2, 3], 1)
    ]


# --- memory
# ------------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_as_a_whole_waits() -> None:
    scheduler = make_scheduler(
        make_request("a", range(10, 30)),
        make_request("b", range(50, 70)),
        num_blocks=10,
        max_num_batched_tokens=8,
    )
    assert chunks(step(scheduler)) == [(0, 0, 8)]
    assert chunks(step(scheduler)) == [(0, 8, 8)]
    # Four tokens and five blocks are left, which is one too few: one is spare for the sequence
    # ahead.
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
    assert output.admitted == [AdmittedSequence(0, second, list(range(80, 93)))]
    # It held 3, 4, 6, 8 and 10. Four are still known, the last was given to the other sequence.
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


def test_nobody_is_preempted_when_it_would_not_suffice() -> None:
    scheduler = make_scheduler(
        make_request("a", range(10, 30), priority=0),
        make_request("b", range(30, 38), priority=2),
        num_blocks=10,
        policy=SchedulingPolicy.priority,
    )
    step(scheduler, 5, 6)
    scheduler.add(make_request("c", range(50, 74), priority=1))  # 6 blocks, 5 without a's
    step(scheduler, 7, 8)
    assert (scheduler.num_preemptions, scheduler.num_running, scheduler.num_waiting) == (0, 2, 1)


def test_a_cache_that_can_not_hold_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_model_len=41 tokens needs 11 blocks of 4 .* has 10"):
        make_scheduler(num_blocks=10, max_model_len=41)
    make_scheduler(num_blocks=10, max_model_len=40)


# --- one step ahead
# ------------------------------------------------------------------------------------


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
def test_nobody_is_preempted_for_what_comes_back_anyway(num_blocks: int, max_num_seqs: int) -> None:
    """An urgent request lacks a row, or blocks, that an aborted one gives back with the next update."""
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
    with pytest.raises(ValueError, match="samples 2 tokens, its result has 1 tokens"):
        scheduler.update(output, StepResult([5]))
    assert len(scheduler.update(output, StepResult([5, 6]))) == 2


# --- requests come and go
# ------------------------------------------------------------------------------


def test_abort_answers_once() -> None:
    scheduler = make_scheduler(make_request("a", [10]), make_request("b", [11]), max_num_seqs=1)
    step(scheduler, 5)
    assert list(scheduler.requests()) == ["a", "b"]
    assert scheduler.abort("b") == SequenceOutput("b", [], FinishReason.abort)
    assert scheduler.abort("b") is None
    assert scheduler.abort("a") == SequenceOutput("a", [], FinishReason.abort)
    assert scheduler.abort("a") is None
    assert scheduler.abort("never added") is None
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_abort_of_a_waiting_request_leaves_the_others_in_place() -> None:
    scheduler = make_scheduler(*(make_request(name, [ord(name)]) for name in "abcd"))
    scheduler.abort("b")
    admitted = [entry.request.request_id for entry in step(scheduler, 5, 6, 7).admitted]
    assert admitted == ["a", "c", "d"]


@pytest.mark.parametrize("num_tokens", [0, 40])
def test_a_prompt_must_leave_room_for_a_token(num_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"1 to 39 tokens .* got {num_tokens}") as caught:
        make_scheduler(make_request("a", range(num_tokens)))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_an_id_is_in_use_until_its_request_ends() -> None:
    scheduler = make_scheduler(make_request("a", [10]))
    with pytest.raises(InvalidRequestError, match="request_id 'a' is in use"):
        scheduler.add(make_request("a", [11]))
    assert scheduler.num_waiting == 1
