"""Compares steps and outputs of the scheduler with literal values. A block has 4 tokens here."""

from __future__ import annotations

import pytest

from ostinato.conf.schema import SchedulingPolicy
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput, TokenLogprobs
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import (
    AdmittedSequence,
    ScheduledSequence,
    SchedulerOutput,
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
        assert outputs.finish_reason is None, "the request ended too early"
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


# --- budget, rows, order --------------------------------------------------------------------------


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
    """Priority puts a long prompt ahead of a stream, which still gets a token in every step."""
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


# --- prefix sharing -------------------------------------------------------------------------------


def test_equal_prompts_of_one_step_share_all_full_blocks() -> None:
    """The second and third compute only the last block, as `n` completions of one prompt do."""
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


# --- requests arrive and leave --------------------------------------------------------------------


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
