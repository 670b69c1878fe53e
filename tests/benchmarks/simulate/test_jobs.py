"""Simulated load: closed loops, turns that follow an answer, limits of the client, rounds."""

from __future__ import annotations

import numpy as np
import pytest

from ostinato.benchmarks.load.job import JobRequest, LoadJob
from ostinato.benchmarks.simulate.fleet import simulate_open
from ostinato.benchmarks.simulate.jobs import JobTraffic, simulate_job
from tests.benchmarks.simulate.simulations import make_spec, rows


def make_job(requests: list[JobRequest], **changes) -> LoadJob:
    return LoadJob(url="", model="", requests=requests, **changes)


def most_at_once(table: np.ndarray) -> int:
    """The largest number of requests that are under way at one time."""
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
        # Each further request is sent at the moment at which another one ends.
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
