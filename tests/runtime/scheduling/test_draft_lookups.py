"""The frequency of draft lookups, and the time of steps without drafts against the prediction."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.speculation.proposer import Draft
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult
from tests.runtime.cost_tables import make_table
from tests.runtime.scheduling.scheduler_steps import make_request, must_schedule, step


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
    """The numbers of the drafter's calls and of compared steps, for one sequence."""
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
