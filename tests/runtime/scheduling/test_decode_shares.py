"""A request of many sequences slows other requests only a little, and all sequences advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.decode_shares import DecodeShares, quotas
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.speculation.proposer import Draft, DraftSource
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput, StepResult

# LINEAR: a step of n decodes takes 1 + n / 4 ms, as on a CPU. FLAT: it takes 1 ms, as on a GPU.
SIZES = (1, 4, 16, 64)
LINEAR = CostTable.from_medians(
    tokens=(1, 256),
    seqs=SIZES,
    contexts=(0, 512),
    seconds=[0.001] * 16,
    decode=[(1 + size / 4) / 1e3 for size in SIZES for _ in range(2)],
)
FLAT = CostTable.from_medians(
    tokens=(1, 256), seqs=SIZES, contexts=(0, 512), seconds=[0.001] * 16, decode=[0.001] * 8
)


class Run:
    """A scheduler whose sequences all decode, and the number of tokens that each sequence has got.

    Args:
        sizes: sequences of each request.
        costs: the costs of the scheduler's steps.
        max_slowdown: the limit of `DecodeShares`.
        in_flight: the most steps in flight.
    """

    def __init__(
        self, *sizes: int, costs: CostTable = LINEAR, max_slowdown: float = 1.55, in_flight: int = 1
    ) -> None:
        self.sizes = sizes
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=256),
            KVCacheManager(2000, 4),
            max_model_len=100,
            max_in_flight=in_flight,
            shares=DecodeShares(costs, max_slowdown),
        )
        self.tokens: Counter[str] = Counter()
        for group, size in enumerate(sizes, 1):
            for place in range(size):
                self.scheduler.add(
                    Request(
                        request_id=f"{group}:{place}",
                        prompt_token_ids=[group, place + 1],
                        sampling=SamplingParams(max_tokens=90, ignore_eos=True),
                        place=place,
                        group=group,
                        group_size=size,
                    )
                )
        while self.tokens.total() < sum(sizes):
            self.update(self.schedule())
        self.tokens.clear()

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output is not None
        return output

    def update(self, output: SchedulerOutput) -> None:
        result = StepResult([7] * len(output.scheduled))
        for one in self.scheduler.update(output, result):
            self.tokens[one.request_id] += 1
        self.scheduler.check_integrity()

    def step(self) -> list[int]:
        """Run a step; returns for each request how many of its sequences were in the step."""
        before = self.tokens.copy()
        self.update(self.schedule())
        groups = Counter(name.partition(":")[0] for name in self.tokens - before)
        return [groups[str(group)] for group in range(1, len(self.sizes) + 1)]


def test_a_small_request_is_not_slowed_by_a_large_one():
    """A step with one sequence of each request takes 1.5 ms.

    Steps may take 1.55 times as long, so 5 sequences fit (2.25 ms).
    """
    run = Run(40, 1)
    for _ in range(20):
        assert run.step() == [4, 1]
    assert run.tokens["2:0"] == 20
    large = [run.tokens[f"1:{place}"] for place in range(40)]
    assert set(large) == {2}  # they take turns


@pytest.mark.parametrize("sizes", [(40,), (1, 1, 1, 1), (8, 8, 8), (3, 3)])
def test_equal_requests_share_whole_steps(sizes):
    run = Run(*sizes)
    assert run.step() == list(sizes)


def test_where_many_sequences_cost_nothing_none_rests():
    assert Run(50, 1, 1, costs=FLAT).step() == [50, 1, 1]


def test_one_more_sequence_runs_even_if_it_takes_too_long():
    assert Run(10, 1, max_slowdown=1.0).step() == [2, 1]


def test_the_large_request_has_whole_steps_when_the_others_have_ended():
    run = Run(40, 1)
    assert run.step() == [4, 1]
    run.scheduler.abort("2:0")
    assert run.step() == [40, 0]


def test_requests_that_were_equal_and_have_ended_in_part():
    """The shares follow the number of sequences that a request had at first."""
    run = Run(8, 8)
    for place in range(6):
        run.scheduler.abort(f"1:{place}")
    assert run.step() == [2, 8]


def test_steps_ahead_of_their_results():
    run = Run(20, 1, in_flight=2)
    first = run.schedule()
    for _ in range(40):
        second = run.schedule()
        run.update(first)
        first = second
    assert run.tokens["2:0"] == 40
    large = [run.tokens[f"1:{place}"] for place in range(20)]
    assert max(large) - min(large) <= 1


@given(st.lists(st.integers(1, 20), min_size=2, max_size=8), st.data())
def test_places_are_divided_equally(sizes, data):
    most = data.draw(st.integers(len(sizes), max(len(sizes), sum(sizes) - 1)))
    waits = data.draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    if most >= sum(sizes):
        return
    given_places = quotas(sizes, most, waits)
    assert sum(given_places) == most
    assert all(1 <= one <= size for one, size in zip(given_places, sizes, strict=True))
    for mine, size in zip(given_places, sizes, strict=True):
        assert mine == size or mine >= max(given_places) - 1


@given(st.lists(st.integers(1, 12), min_size=2, max_size=5))
@settings(max_examples=20)
def test_every_sequence_advances(sizes):
    run = Run(*sizes, max_slowdown=1.1)
    steps = 3 * sum(sizes)
    for _ in range(min(steps, 80)):
        counts = run.step()
        assert all(counts)
    if steps <= 80:
        assert min(run.tokens.values()) >= 1
        assert len(run.tokens) == sum(sizes)


class Sure:
    """A drafter whose drafts are always right."""

    max_drafts = 3

    def propose(self, request: Request, token_ids: Iterable[int], most: int) -> Draft | None:
        return Draft([7] * most, DraftSource.prediction)

    def learn(self, request: Request, token_ids: Iterable[int]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass


@pytest.mark.parametrize("max_slowdown", [1.5, None])
def test_drafts_of_a_large_request_do_not_slow_a_small_one(max_slowdown):
    """A draft token takes a fifth of a sequence's time. Without a limit all sequences get drafts."""
    costs = CostTable.from_medians(
        tokens=(1, 256),
        seqs=SIZES,
        contexts=(0, 512),
        seconds=[0.001] * 16,
        decode=[(1 + size / 4) / 1e3 for size in SIZES for _ in range(2)],
        verify={(q, s): s * (q - 1) / 20 / 1e3 for q in (2, 4) for s in (1, 64)},
    )
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=256),
        KVCacheManager(2000, 4),
        max_model_len=400,
        limits=StepLimits(64, 256, rows_per_seq=4),
        proposer=Sure(),
        draft_costs=costs,
        shares=None if max_slowdown is None else DecodeShares(costs, max_slowdown),
    )
    for group, size in enumerate((8, 1), 1):
        for place in range(size):
            scheduler.add(
                Request(
                    request_id=f"{group}:{place}",
                    prompt_token_ids=[group, place + 1],
                    sampling=SamplingParams(max_tokens=300, ignore_eos=True),
                    place=place,
                    group=group,
                    group_size=size,
                )
            )
    for index in range(20):
        output = scheduler.schedule()
        assert output is not None
        counts = [entry.num_logits for entry in output.scheduled]
        groups = [one.request.group for one in scheduler._in_flight[0].sequences]
        drafts = Counter[int]()
        for group, entry in zip(groups, output.scheduled, strict=True):
            drafts[group] += entry.num_drafts
        scheduler.update(output, StepResult([7] * sum(counts), counts=counts))
        if not index:
            continue  # the prompts
        seconds = (1 + len(groups) / 4 + drafts.total() / 20) / 1e3
        assert drafts[2] == 3
        if max_slowdown is None:
            assert drafts[1] == 8 * 3
        else:
            assert drafts[1] > 0
            assert seconds <= max_slowdown * (1 + 2 / 4 + 3 / 20) / 1e3
