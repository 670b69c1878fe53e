"""Figures of the measurement of several engines; prefix-aware routing in a simulated fleet."""

from __future__ import annotations

import random

import pytest

from ostinato.benchmarks.load.job import JobRequest, LoadJob
from ostinato.benchmarks.parallel.even_division import EvenDivision, limit_of
from ostinato.benchmarks.parallel.several_engines import ideal_share, longest_gap
from ostinato.benchmarks.simulate.jobs import simulate_job
from tests.benchmarks.simulate.simulations import make_spec


def test_the_ideal_computes_every_prefix_once() -> None:
    first, second = [1] * 256, [2] * 256
    prompts = [[*first, 5], [*first, 6, 7], [*second, 5], [*first, 8]]
    assert ideal_share(prompts) == 2 * 256 / sum(map(len, prompts))


def test_the_longest_pause_overlaps_the_interval() -> None:
    times = [0.0, 3.0, 3.1, 4.0, 4.1, 9.0]
    assert longest_gap(times, 3.05, 3.5) == pytest.approx(0.9)
    assert longest_gap(times, 1.0, 3.5) == pytest.approx(3.0)
    assert longest_gap([1.0], 0.0, 2.0) == 0.0


def test_simulated_hits_are_nearly_ideal_behind_the_router_that_knows_prefixes() -> None:
    """The thirty prefixes fit into the caches of both engines together, but not into one cache."""
    draw = random.Random(3)
    spec = make_spec(num_blocks=400, block_size=16, max_model_len=512)
    known = [[100 * number + 1] * 256 for number in range(30)]
    prompts = [draw.choice(known) + [draw.randrange(5000) for _ in range(32)] for _ in range(900)]
    requests = [JobRequest(prompt=prompt, max_tokens=8) for prompt in prompts]
    job = LoadJob(url="", model="", requests=requests, concurrency=8)

    def share(router: str) -> float:
        results = simulate_job(spec, job, num_replicas=2, router=router)
        return sum(results.num_cached) / sum(map(len, prompts))

    aware, least = share("prefix_aware"), share("least_load")
    assert aware >= 0.9 * ideal_share(prompts)
    assert aware > least + 0.1


def test_equal_halves_wait_for_the_slower_core() -> None:
    assert limit_of([5, 5], [5, 5]) == 1.0
    assert limit_of([4, 8], [8, 4]) == 2 * 8 / 24
    with EvenDivision() as division:
        assert 0 < division.measure(0.05) <= 1
