"""Several simulated engines: routers, and processes that share the work."""

from __future__ import annotations

import random
from functools import partial

import pytest

from ostinato.benchmarks.simulate.fleet import simulate_open
from ostinato.benchmarks.simulate.simulated_replica import Arrival
from tests.benchmarks.simulate.simulations import make_spec, random_traffic, rows


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
