"""The simulator: fast-forward against single steps, fleets, routers, and figures checked against literals."""

from __future__ import annotations

import math
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.benchmarks.load.job import JobRequest, LoadJob
from ostinato.benchmarks.report.statistics import percentile
from ostinato.benchmarks.simulate.fast_forward import FastForwardScheduler
from ostinato.benchmarks.simulate.fleet import simulate_open
from ostinato.benchmarks.simulate.jobs import JobTraffic, simulate_job
from ostinato.benchmarks.simulate.results import SimulationResults
from ostinato.benchmarks.simulate.simulated_drafts import DraftSpec
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.simulated_replica import Arrival
from ostinato.benchmarks.simulate.step_times.overheads import (
    ServingOverheads,
    SizedValues,
    StepClock,
)
from ostinato.benchmarks.simulate.step_times.step_noise import StepRatios
from ostinato.conf.schema import SchedulerConfig, SchedulingPolicy
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput, StepResult
from tests.runtime.cost_tables import make_table


def make_spec(**changes) -> EngineSpec:
    values = {
        "scheduler": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        "upper": StepLimits(8, 64),
        "num_blocks": 129,
        "block_size": 8,
        "max_model_len": 256,
        "costs": make_table(),
    }
    return EngineSpec(**(values | changes))


def random_traffic(seed: int, count: int, rate: float, *, shared: int = 0):
    """Poisson arrivals of prompts that begin with `shared` common tokens."""
    numbers = random.Random(seed)
    now = 0.0
    for key in range(count):
        now += numbers.expovariate(rate)
        prompt = [*range(shared), *range(1000 * key, 1000 * key + numbers.randint(1, 90))]
        yield Arrival(now, prompt, numbers.randint(1, 60), numbers.randint(0, 2))


def rows(results: SimulationResults) -> np.ndarray:
    """[requests, (key, sent, first, last, prompt, output, cached)], by key."""
    columns = [
        results.keys,
        results.sent_s,
        results.first_s,
        results.last_s,
        results.num_prompt,
        results.num_output,
        results.num_cached,
    ]
    table = np.array(columns).T
    return table[np.argsort(table[:, 0])]


def test_one_request_by_hand():
    # 20 prompt tokens in one step, then four decodes; the table has 2 ms a step, 0.1 ms a token,
    # 0.05 ms a sequence and 1 us for every pair of a token and a context.
    results = simulate_open(make_spec(), lambda: iter([Arrival(1.0, range(20), 5)]))
    first = 1.0 + (2.0 + 20 * 0.1 + 0.05) / 1e3
    decodes = [(2.0 + 0.1 + 0.05) / 1e3 + context * 1e-6 for context in (20, 21, 22, 23)]
    assert list(results.first_s) == pytest.approx([first])
    assert list(results.last_s) == pytest.approx([first + sum(decodes)])
    assert results.num_steps == 5
    seconds, counts = results.gaps
    assert counts.sum() == 4
    assert (seconds * counts).sum() == pytest.approx(sum(decodes))


def test_stages_work_at_the_same_time_and_one_sequence_does_not_gain():
    alone = [Arrival(0.0, range(20), 30)]
    whole, staged = (
        simulate_open(make_spec(num_stages=stages), lambda: iter(alone)) for stages in (1, 2)
    )
    assert list(staged.last_s) == pytest.approx(list(whole.last_s))

    # Steps of four sequences take nearly as long as steps of eight, and two run at once.
    many = [Arrival(0.0, range(100 * key, 100 * key + 20), 40) for key in range(8)]
    whole, staged = (
        simulate_open(make_spec(num_stages=stages), lambda: iter(many)) for stages in (1, 2)
    )
    assert len(staged.last_s) == 8
    before = max(whole.last_s)
    assert 0.5 * before <= max(staged.last_s) < 1.1 * before
    # With prompts in chunks that follow each other, both stages have work all the time.
    long = [Arrival(0.0, range(1000 * key, 1000 * key + 190), 1) for key in range(8)]
    whole, staged = (
        simulate_open(make_spec(num_stages=stages), lambda: iter(long)) for stages in (1, 2)
    )
    assert max(staged.last_s) < 0.65 * max(whole.last_s)


def step_ratios(*seqs: tuple[int, float], tokens: float = 1.0) -> StepRatios:
    """Step times that do not vary, by (number of decoding sequences plus one, ratio)."""
    curve = tuple((number, math.log(ratio)) for number, ratio in seqs)
    return StepRatios(((1, math.log(tokens)),), curve, (1.0,), (0,))


def make_overheads(**changes) -> ServingOverheads:
    """Overheads without randomness: every distribution has one value."""
    values = {
        "decode": step_ratios((2, 1.5)),
        "prompt": step_ratios((1, 1.0), tokens=2.0),
        "pause_s": (0.001,),
        "idle_request_s": (0.25,),
        "busy_request_s": (SizedValues(1, (0.5,)),),
        "delivery_s": ((0.003,),),
        "end_s": (0.125,),
    }
    return ServingOverheads(**(values | changes))


def test_what_serving_adds_comes_on_top():
    results = simulate_open(
        make_spec(overheads=make_overheads()), lambda: iter([Arrival(1.0, range(20), 3)])
    )
    first = 1.25 + 2 * 4.05e-3  # the prompt's step takes twice what the table says
    decodes = [0.001 + 1.5 * (2.15e-3 + context * 1e-6) for context in (20, 21)]
    assert list(results.first_s) == pytest.approx([first + 0.003])
    assert list(results.last_s) == pytest.approx([first + sum(decodes) + 0.003])
    seconds, counts = results.gaps
    assert list(seconds) == pytest.approx(decodes)
    assert list(counts) == [1, 1]


def test_tokens_that_arrive_together_are_one_piece():
    # The first step's token is late, so that it comes with the next one's or after.
    overheads = make_overheads(delivery_s=((0.1,), (0.0,)))
    results = simulate_open(
        make_spec(overheads=overheads, seed=3), lambda: iter([Arrival(0.0, range(20), 30)])
    )
    seconds, _ = results.gaps
    assert 0 < len(seconds) < 29
    assert (seconds > 0.0).all()
    assert results.last_s[0] > results.first_s[0]


def test_draws_are_seeded_and_between_sizes():
    overheads = make_overheads(decode=step_ratios((2, 1.0), (8, 4.0)), pause_s=(0.0, 0.001, 0.002))
    traffic = partial(random_traffic, 3, 30, 100.0)
    one, same, other = (
        rows(simulate_open(make_spec(overheads=overheads, seed=seed), traffic))
        for seed in (1, 1, 2)
    )
    assert (one == same).all()
    assert (one != other).any()
    clock = StepClock(make_table(), overheads)
    ratios = {
        size: clock.step(decodes_of(size)) / make_table().decode_seconds(size, 10)
        for size in (1, 3, 7, 16)
    }
    # Curves are keyed by powers of two of the number of sequences plus one.
    assert ratios == pytest.approx({1: 1.0, 3: 2.0, 7: 4.0, 16: 4.0})


def decodes_of(num_seqs: int) -> SchedulerOutput:
    """A step in which this number of sequences decode, each after ten tokens."""
    scheduled = [ScheduledSequence(row, 10, 1, [], [], 1) for row in range(num_seqs)]
    return SchedulerOutput(scheduled, [], num_seqs)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    rate=st.sampled_from([5.0, 40.0, 400.0]),
    blocks=st.sampled_from([33, 50, 129]),
    shared=st.sampled_from([0, 40]),
    overlap=st.booleans(),
    policy=st.sampled_from(list(SchedulingPolicy)),
    target=st.sampled_from([None, 4.0]),
)
def test_leaps_give_what_single_steps_give(seed, rate, blocks, shared, overlap, policy, target):
    spec = make_spec(
        num_blocks=blocks,
        overlap=overlap,
        scheduler=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, policy=policy, itl_target_ms=target
        ),
    )
    traffic = partial(random_traffic, seed, 40, rate, shared=shared)
    fast, slow = (
        simulate_open(spec, traffic, fast_forward=fast_forward) for fast_forward in (True, False)
    )
    assert fast.num_ended == 40
    assert fast.counters == slow.counters
    assert fast.num_steps == slow.num_steps
    assert rows(fast) == pytest.approx(rows(slow), rel=1e-9, abs=1e-9)
    assert sum(fast.gaps[1]) == sum(slow.gaps[1])
    for share in (0.5, 0.99):
        ours, stepwise = (
            percentile(gaps, 100 * share, counts) for gaps, counts in (fast.gaps, slow.gaps)
        )
        assert ours == pytest.approx(stepwise, rel=0.02)


def drive(scheduler: FastForwardScheduler, count: int) -> None:
    """This number of single steps, all of which sample."""
    for _ in range(count):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(output, StepResult([9] * len(output.scheduled)))


def test_fast_forward_leaves_the_same_blocks():
    tables = []
    for fast_forward in (True, False):
        spec = make_spec()
        cache = spec.cache()
        scheduler = FastForwardScheduler(
            spec.scheduler, cache, max_model_len=256, limits=spec.limits
        )
        for key, length in enumerate((3, 8, 15, 30)):
            prompt = list(range(100 * key, 100 * key + length))
            sampling = SamplingParams(max_tokens=80, ignore_eos=True)
            scheduler.add(Request(request_id=str(key), prompt_token_ids=prompt, sampling=sampling))
        drive(scheduler, 2)
        assert scheduler.num_equal_steps(10) == 10
        assert scheduler.num_equal_steps(1000) == 78 - 1
        if fast_forward:
            scheduler.fast_forward(41, 9)
        else:
            drive(scheduler, 41)
        scheduler.check_integrity()
        output = scheduler.schedule()
        assert output is not None
        tables.append(
            (
                [(entry.row, entry.start, entry.new_block_ids) for entry in output.scheduled],
                [list(sequence.block_table.block_ids) for sequence in scheduler.queues.running],
                [list(sequence.block_table.hashes) for sequence in scheduler.queues.running],
                cache._pool.free_block_ids(),
                scheduler.num_output_tokens,
            )
        )
    assert tables[0] == tables[1]


def test_no_fast_forward_over_an_end_or_a_shortage():
    spec = make_spec(num_blocks=33, max_model_len=128)
    scheduler = FastForwardScheduler(
        spec.scheduler, spec.cache(), max_model_len=128, limits=spec.limits
    )
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    scheduler.add(Request(request_id="a", prompt_token_ids=[1, 2], sampling=sampling))
    drive(scheduler, 1)
    assert scheduler.num_equal_steps(100) == 3  # the fifth token ends it
    drive(scheduler, 3)
    assert scheduler.num_equal_steps(100) == 0


@pytest.mark.parametrize("router", ["round_robin", "least_load", "prefix_aware"])
def test_every_request_ends_once_behind_every_router(router):
    traffic = partial(random_traffic, 3, 120, 300.0, shared=32)
    results = simulate_open(make_spec(), traffic, num_replicas=5, router=router)
    assert sorted(results.keys) == list(range(120))
    table = rows(results)
    assert (table[:, 2] > table[:, 1]).all()
    assert (table[:, 3] >= table[:, 2]).all()


def test_a_fleet_of_one_is_one_engine_whatever_the_router():
    traffic = partial(random_traffic, 5, 60, 100.0, shared=32)
    alone, *others = (
        simulate_open(make_spec(), traffic, router=router)
        for router in ("round_robin", "least_load", "prefix_aware")
    )
    for other in others:
        assert rows(other) == pytest.approx(rows(alone), rel=1e-9)


def test_processes_change_nothing():
    traffic = partial(random_traffic, 7, 60, 200.0)
    one, two = (
        simulate_open(make_spec(), traffic, num_replicas=4, num_processes=number)
        for number in (1, 2)
    )
    assert rows(two) == pytest.approx(rows(one), rel=1e-12)
    assert one.counters == two.counters


def test_least_load_beats_round_robin_on_uneven_requests():
    def traffic():
        # Every third request is long, so round robin sends all long ones to one of three replicas.
        for key in range(90):
            yield Arrival(key * 0.012, range(100 * key, 100 * key + 40), 120 if key % 3 == 0 else 2)

    means = [
        float(simulate_open(make_spec(), traffic, num_replicas=3, router=router).e2e_s.mean())
        for router in ("round_robin", "least_load")
    ]
    assert means[1] < 0.9 * means[0]


def test_prefix_aware_finds_more_prefixes():
    def traffic():
        numbers = random.Random(1)
        for key in range(160):
            base = 1000 * numbers.randrange(12)
            yield Arrival(
                key * 0.01,
                [*range(base, base + 96), *range(10**6 + 50 * key, 10**6 + 50 * key + 9)],
                4,
            )

    hits = [
        simulate_open(make_spec(num_blocks=65), traffic, num_replicas=4, router=router).counters[
            "prefix_hits"
        ]
        for router in ("round_robin", "prefix_aware")
    ]
    assert hits[1] > 1.5 * hits[0]


def make_job(requests: list[JobRequest], **changes) -> LoadJob:
    return LoadJob(url="", model="", requests=requests, **changes)


def most_at_once(table: np.ndarray) -> int:
    """Requests under way at a time, at most."""
    return max(int(((table[:, 1] <= time) & (table[:, 3] > time)).sum()) for time in table[:, 1])


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_closed_loop_keeps_its_concurrency(replicas):
    requests = [
        JobRequest(prompt=list(range(100 * key, 100 * key + 10)), max_tokens=6 + key % 5)
        for key in range(24)
    ]
    job = make_job(requests, concurrency=6)
    fast, slow = (
        simulate_job(
            make_spec(), job, num_replicas=replicas, router="least_load", fast_forward=fast_forward
        )
        for fast_forward in (True, False)
    )
    table = rows(fast)
    assert len(table) == 24
    assert most_at_once(table) == 6
    assert table == pytest.approx(rows(slow), rel=1e-9)
    if replicas == 1:
        # The next one is sent in the moment in which one ends.
        assert set(np.round(table[6:, 1], 9)) <= set(np.round(table[:, 3], 9))


def test_a_closed_loop_begins_nothing_after_its_time():
    requests = [JobRequest(prompt=[key + 1] * 8, max_tokens=20) for key in range(50)]
    results = simulate_job(make_spec(), make_job(requests, concurrency=2, stop_after_s=0.2))
    assert 4 < results.num_ended < 50
    assert max(results.sent_s) <= 0.2 < max(results.last_s)


def test_turns_wait_for_the_answer_and_find_it_in_the_cache():
    requests = [
        JobRequest(prompt=list(range(40)), max_tokens=16, at_s=0.5),
        JobRequest(prompt=list(range(1000, 1008)), max_tokens=4, after=0, think_s=2.0),
    ]
    table = rows(simulate_job(make_spec(), make_job(requests)))
    assert table[1, 1] == pytest.approx(table[0, 3] + 2.0)
    assert list(table[:, 4]) == [40, 64]
    assert table[1, 6] == 48  # of 55 computed tokens, whole blocks of 8


def test_requests_wait_at_the_client_while_many_are_under_way():
    requests = [
        JobRequest(prompt=[key + 1] * 8, max_tokens=10, at_s=0.001 * key) for key in range(9)
    ]
    table = rows(simulate_job(make_spec(), make_job(requests, max_concurrency=1)))
    assert list(table[:, 1]) == pytest.approx([0.001 * key for key in range(9)])  # intended
    ends = table[:, 3]
    assert (table[1:, 2] > ends[:-1]).all()  # served one after the other


def test_rounds_repeat_the_traffic_with_other_ids():
    requests = [JobRequest(prompt=list(range(48)), max_tokens=4, at_s=at) for at in (0.0, 1.0, 2.0)]
    traffic = JobTraffic(requests, 3, 10.0, 5000)
    assert traffic.num_requests == 9
    arrivals = list(traffic())
    assert [one.time_s for one in arrivals] == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert [one.prompt[0] for one in arrivals] == [0] * 3 + [5000] * 3 + [10000] * 3
    results = simulate_open(make_spec(), traffic)
    assert list(results.num_cached) == [0, 40, 40] * 3


def test_requests_that_the_engine_would_refuse_are_counted():
    requests = [Arrival(0.0, range(300), 4), Arrival(0.0, [], 4), Arrival(0.0, range(9), 4)]
    results = simulate_open(make_spec(), lambda: iter(requests))
    assert (results.num_refused, results.num_ended) == (2, 1)


def test_weighted_percentiles_are_those_of_repeated_values():
    numbers = np.random.default_rng(2)
    values, weights = numbers.random(50), numbers.integers(1, 9, 50)
    repeated = np.repeat(values, weights)
    for share in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, 100 * share, weights) == pytest.approx(
            np.quantile(repeated, share)
        )


def duration(drafts: DraftSpec | None, *, count: int = 1) -> float:
    """Seconds until requests of 30 prompt tokens and 41 output tokens each have ended."""
    requests = [
        JobRequest(prompt=[100 * key + place for place in range(30)], max_tokens=41, at_s=0.0)
        for key in range(count)
    ]
    changes = {"upper": StepLimits(8, 64, 4)} if drafts else {}
    results = simulate_job(
        make_spec(drafts=drafts, **changes), LoadJob(url="", model="", requests=requests)
    )
    assert list(results.num_output) == [41] * count
    return max(results.last_s)


def test_right_drafts_by_hand():
    """After the prompt's step 40 tokens come in ten steps of four tokens each."""
    spec = DraftSpec(max_drafts=3, acceptance=1.0, adaptive=False)
    table = make_table()
    steps = [
        table.decode_seconds(1, start) + table.verify_surcharge(1, 3) for start in range(30, 70, 4)
    ]
    assert duration(spec) == pytest.approx(table.step_seconds(30, 1, 0) + sum(steps), rel=1e-3)


@pytest.mark.parametrize("count", [1, 4])
def test_the_simulated_number_of_drafts_follows_their_worth(count: int):
    plain = duration(None, count=count)
    right, half, wrong = (
        duration(DraftSpec(max_drafts=3, acceptance=chance), count=count)
        for chance in (1.0, 0.5, 0.0)
    )
    assert right < 0.6 * plain
    assert right < half < plain
    assert plain <= wrong < 1.15 * plain


def test_a_simulated_draft_model_takes_time():
    plain = duration(None)
    cheap, costly = (
        duration(
            DraftSpec(
                max_drafts=3,
                acceptance=0.9,
                model_costs=make_table(step_ms=step_ms, token_ms=step_ms / 20),
            )
        )
        for step_ms in (0.1, 4.0)
    )
    free = duration(DraftSpec(max_drafts=3, acceptance=0.9))
    assert free < cheap < 0.7 * plain
    assert plain < costly < 1.5 * plain
