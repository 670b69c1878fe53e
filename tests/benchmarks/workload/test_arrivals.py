"""Arrivals follow their seed, their rate, their burstiness and their ramp."""

import itertools
import statistics

import pytest

from ostinato.benchmarks.workload.arrivals import LoadPoint, arrival_times, load_points, rate_at
from ostinato.conf.errors import ConfigError
from ostinato.conf.sections.bench_schema import LoadSection, Ramp

COUNT = 4000


def gaps(load: LoadSection, rate: float) -> list[float]:
    times = arrival_times(LoadPoint(rate=rate), load, [None] * COUNT, seed=7)
    assert times is not None
    assert times[0] == 0
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_gaps_have_the_rate_as_mean_and_the_burstiness_as_shape(burstiness: float):
    found = gaps(LoadSection(burstiness=burstiness), rate=5.0)
    assert statistics.fmean(found) == pytest.approx(0.2, rel=0.15)
    # A gamma distribution of shape `k` has a coefficient of variation of `k ** -0.5`.
    variation = statistics.pstdev(found) / statistics.fmean(found)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.15)


def test_same_seed_same_times():
    point, load = LoadPoint(rate=3.0), LoadSection()
    first = arrival_times(point, load, [None] * 5, seed=1)
    assert first == arrival_times(point, load, [None] * 5, seed=1)
    assert first != arrival_times(point, load, [None] * 5, seed=2)


def test_recorded_times_are_kept_and_a_closed_loop_has_none():
    load = LoadSection()
    assert arrival_times(LoadPoint(), load, [0.0, 1.5, None], seed=0) == [0.0, 1.5, 0.0]
    assert arrival_times(LoadPoint(concurrency=3), load, [None], seed=0) is None


def test_ramps_begin_and_end_where_they_should():
    linear = LoadSection(rates=[2.0], ramp=Ramp.linear, ramp_to=8.0)
    exponential = LoadSection(rates=[2.0], ramp=Ramp.exponential, ramp_to=8.0)
    assert [rate_at(share, 2.0, linear) for share in (0, 0.5, 1)] == [2, 5, 8]
    assert [rate_at(share, 2.0, exponential) for share in (0, 0.5, 1)] == [2, 4, 8]
    found = gaps(linear, rate=2.0)
    assert statistics.fmean(found[:500]) > 2.5 * statistics.fmean(found[-500:])


def test_points_and_their_names():
    points = load_points(LoadSection(rates=[0.5, 2.0], concurrency=[4]))
    assert [point.label for point in points] == ["0.5 requests/s", "2 requests/s", "4 at a time"]
    assert [point.label for point in load_points(LoadSection())] == ["as they come"]


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (LoadSection(ramp=Ramp.linear, rates=[1.0]), "load.ramp=linear goes from load.rates to"),
        (LoadSection(ramp=Ramp.linear, ramp_to=1.0), "load.ramp=linear goes from load.rates to"),
        (LoadSection(ramp_to=4.0), "load.ramp_to=4 needs load.ramp=linear or"),
    ],
)
def test_half_a_ramp_is_refused(load: LoadSection, words: str):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        load_points(load)
