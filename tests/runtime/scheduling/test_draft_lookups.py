"""How often drafts are looked up, predicted costs of steps without drafts, and draft counters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec
import pytest

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.speculation.proposer import Draft, DraftSource
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult
from tests.runtime.cost_tables import make_table
from tests.runtime.scheduling.scheduler_steps import EOS, make_request, must_schedule, step


class Silent:
    """A drafter that never finds a draft; counts how often it is asked."""

    max_drafts = 3

    def __init__(self) -> None:
        self.num_calls = 0

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        self.num_calls += 1
        return None

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass


def lookups(num_steps: int, *, speculation: bool = True, overlap: bool = False) -> tuple[int, int]:
    """The numbers of the drafter's calls and of steps with a predicted cost, for one sequence."""
    drafter = Silent()
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(
        config,
        KVCacheManager(65, 4),
        max_model_len=200,
        max_in_flight=1 + overlap,
        proposer=drafter,
        draft_costs=make_table(),
    )
    request = make_request("a", range(10, 14), max_tokens=100, ignore_eos=True)
    sampling = msgspec.structs.replace(request.sampling, speculation=speculation)
    scheduler.add(msgspec.structs.replace(request, sampling=sampling))
    step(scheduler, 5)  # its prompt
    num_compared = 0
    in_flight = deque([must_schedule(scheduler)] if overlap else [])
    for _ in range(num_steps):
        in_flight.append(must_schedule(scheduler))
        scheduler.update(in_flight.popleft(), StepResult([5]))
        scheduler.check_integrity()
        assert scheduler._last_read is not None
        num_compared += scheduler._last_read.load is not None
        scheduler.observe(0.004)
    return drafter.num_calls, num_compared


def test_after_eight_steps_without_a_draft_one_step_of_eight_looks_for_one() -> None:
    assert lookups(72) == (8 + 8, 8 + 8)


def test_a_sequence_with_a_step_in_flight_is_looked_up_as_rarely() -> None:
    num_calls, _ = lookups(72, overlap=True)
    assert num_calls == 8 + 8


def test_a_request_without_speculation_is_not_looked_up() -> None:
    assert lookups(72, speculation=False) == (0, 9)


class Guessing(Silent):
    """A drafter that always has a draft, and says that it comes from the request's prediction."""

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        return Draft([7] * most, DraftSource.prediction)


class Interrupted(Guessing):
    """A drafter that waits for 50 ms, as if another program had the processor."""

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        time.sleep(0.05)
        return super().propose(request, token_ids, most)


def test_time_in_which_another_program_runs_is_not_time_of_lookups() -> None:
    """Otherwise drafts would pause for hundreds of steps on a busy machine."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        KVCacheManager(65, 4),
        max_model_len=200,
        proposer=Interrupted(),
        draft_costs=make_table(),
    )
    scheduler.add(make_request("a", range(10, 14), max_tokens=100))
    step(scheduler, 5)  # its prompt
    must_schedule(scheduler)
    load = scheduler._in_flight[0].load
    assert load is not None
    assert 0.0 < load.lookup_seconds < 0.05


@pytest.mark.parametrize("place", range(4))
def test_right_drafts_after_the_end_of_an_answer_are_not_accepted(place: int) -> None:
    """The result says that three drafts are right. The token with index `place` ends the answer."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        KVCacheManager(65, 4),
        max_model_len=200,
        proposer=Guessing(),
    )
    scheduler.add(make_request("a", range(10, 14), max_tokens=100))
    step(scheduler, 5)  # its prompt
    output = must_schedule(scheduler)
    assert output.num_drafts == 3
    tokens = [7, 7, 7, 7]
    tokens[place] = EOS
    [news] = scheduler.update(output, StepResult(tokens, counts=[4]))
    assert news.new_token_ids == tokens[: place + 1]
    num_accepted = min(3, place + 1)
    assert scheduler.drafts is not None
    stats = scheduler.drafts.stats
    assert (stats.num_drafts, stats.num_draft_tokens) == (1, 3)
    assert stats.num_accepted_tokens == num_accepted
    assert stats.accepted_per_position == [int(index < num_accepted) for index in range(3)]
    assert news.speculation is not None
    assert msgspec.structs.astuple(news.speculation) == (
        *(1, 3, num_accepted),
        *(num_accepted, 3 - num_accepted),
    )


def test_drafts_of_an_aborted_request_are_not_accepted() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        KVCacheManager(65, 4),
        max_model_len=200,
        proposer=Guessing(),
    )
    scheduler.add(make_request("a", range(10, 14), max_tokens=100))
    step(scheduler, 5)  # its prompt
    output = must_schedule(scheduler)
    scheduler.abort("a")
    assert scheduler.update(output, StepResult([7, 7, 7, 7], counts=[4])) == []
    assert scheduler.drafts is not None
    stats = scheduler.drafts.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 0)
    scheduler.check_integrity()


def test_a_step_has_no_more_drafts_than_rows_of_logits() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(
        config,
        KVCacheManager(65, 4),
        max_model_len=200,
        limits=StepLimits(4, 64, rows_per_seq=4, max_step_drafts=5),
        proposer=Guessing(),
    )
    for name in "abcd":
        scheduler.add(make_request(name, range(10, 14), max_tokens=100, ignore_eos=True))
    output = must_schedule(scheduler)  # the prompts
    scheduler.update(output, StepResult([5] * 4))
    output = must_schedule(scheduler)
    assert [entry.num_drafts for entry in output.scheduled] == [3, 2, 0, 0]
    assert sum(entry.num_logits for entry in output.scheduled) == scheduler.limits.max_num_rows
