"""The simulator: the figures of one engine against literals, and what serving adds to them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from ostinato.benchmarks.report.statistics import percentile
from ostinato.benchmarks.simulate.fleet import simulate_open
from ostinato.benchmarks.simulate.simulated_replica import Arrival
from ostinato.benchmarks.simulate.step_times.overheads import (
    ServingOverheads,
    SizedValues,
    StepClock,
)
from ostinato.benchmarks.simulate.step_times.step_noise import StepRatios
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput
from tests.benchmarks.simulate.simulations import make_spec, random_traffic, rows
from tests.runtime.cost_tables import make_table


def test_one_request_by_hand():
    # 20 prompt tokens in one step, then four decodes; the table has 2 ms a step, 0.1 ms a token,
    # 0.05 ms a sequence and 1 us for every pair of a token and a token of its context.
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

    # A step of four sequences takes nearly as long as one of eight, and two steps run at once.
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
    """Step times that do not vary: (number of decoding sequences plus one) -> ratio."""
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
    # Some tokens are 0.1 s late. They arrive together with tokens of the following steps.
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
    # A curve's key is the number of decoding sequences plus one.
    assert ratios == pytest.approx({1: 1.0, 3: 2.0, 7: 4.0, 16: 4.0})


def decodes_of(num_seqs: int) -> SchedulerOutput:
    """A step in which this number of sequences decode, each after ten tokens."""
    scheduled = [ScheduledSequence(row, 10, 1, [], [], 1) for row in range(num_seqs)]
    return SchedulerOutput(scheduled, [], num_seqs)


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
