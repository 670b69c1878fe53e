"""Figures of a load measurement, computed from times given as literals."""

import pytest

from ostinato.benchmarks.load.job import LoadReport, RequestTimes
from ostinato.benchmarks.load.serving_metrics import (
    client_warnings,
    failures,
    itl_histogram,
    load_metrics,
)
from ostinato.benchmarks.report.statistics import bootstrap_ratio, percentile, summary
from ostinato.conf.sections.bench_schema import SloSection


def report(*requests: RequestTimes, **changes: object) -> LoadReport:
    fields: dict[str, object] = {
        "requests": list(requests),
        "began_at": 0.0,
        "duration_s": 4.0,
        "loop_lag_ms": {"p50": 0.1, "p99": 1.0, "max": 2.0},
        "send_lag_ms": {"p50": 0.1, "p99": 1.0, "max": 2.0},
        "cpu_share": 0.1,
    }
    return LoadReport(**(fields | changes))  # type: ignore[arg-type]


FIRST = RequestTimes(
    status="ok",
    intended_s=0.0,
    sent_s=0.5,
    end_s=2.0,
    chunk_s=[1.0, 1.5, 2.0],
    num_prompt_tokens=10,
    num_cached_tokens=4,
    num_output_tokens=5,
)
SECOND = RequestTimes(
    status="ok", intended_s=1.0, sent_s=1.0, end_s=1.2, chunk_s=[1.2], num_output_tokens=1
)
FAILED = RequestTimes(status="http 500", end_s=1.0, error="boom")


def test_figures():
    metrics = load_metrics(report(FIRST, SECOND, FAILED), SloSection(ttft_ms=500), [50, 99])
    found = {name: metric.value for name, metric in metrics.items()}
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 1.5
    assert found["total_throughput"] == 4.0
    assert found["peak_concurrency"] == 2
    assert found["cached_prompt_share"] == 0.4
    assert found["ttft_mean"] == pytest.approx(600)  # from the intended times
    assert found["ttft_p50"] == pytest.approx(600)
    assert found["tpot_p50"] == pytest.approx(250)  # only the first request has a TPOT
    assert found["itl_p50"] == pytest.approx(500)
    assert found["e2e_mean"] == pytest.approx(1100)
    assert found["client_queue_mean"] == pytest.approx(250)
    assert found["goodput"] == 0.25
    assert found["slo_attainment"] == pytest.approx(1 / 3)
    assert "goodput" not in load_metrics(report(FIRST), SloSection(), [50])


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft_ms": 1000.0, "e2e_ms": 2000.0}, 2),
        ({"itl_ms": 400.0}, 1),
        ({"tpot_ms": 250.0}, 2),
        ({"e2e_ms": 1000.0}, 1),
        ({"ttft_ms": 100.0}, 0),
    ],
)
def test_goodput_counts_those_within_every_goal(goals: dict[str, float], good: int):
    metrics = load_metrics(report(FIRST, SECOND), SloSection(**goals), [50])
    assert metrics["goodput"].value * 4 == good


def test_failures_are_counted_with_an_example():
    assert failures(report(FIRST, FAILED, FAILED)) == {"http 500": {"count": 2, "example": "boom"}}


def test_nothing_succeeded():
    found = load_metrics(report(FAILED), SloSection(itl_ms=5), [50])
    assert found["completed"].value == 0
    assert found["slo_attainment"].value == 0
    assert "ttft_p50" not in found


def test_the_histogram_counts_every_gap():
    histogram = itl_histogram(report(FIRST, SECOND))
    assert sum(histogram["counts"]) == 2
    assert len(histogram["counts"]) == len(histogram["edges_ms"]) == 1
    assert histogram["edges_ms"][0] <= 500
    assert itl_histogram(report(SECOND)) == {"edges_ms": [], "counts": []}


def test_a_client_that_is_late_or_busy_warns():
    assert client_warnings(report(FIRST)) == []
    late = client_warnings(report(SECOND, loop_lag_ms={"p50": 1.0, "p99": 40.0, "max": 50.0}))
    assert "its own timer fired up to 40 ms late" in late[0]
    late = client_warnings(report(FIRST, send_lag_ms={"p50": 1.0, "p99": 2351.0, "max": 3000.0}))
    assert "requests were sent up to 2,351 ms late" in late[0]
    assert "used 95% of a core" in client_warnings(report(FIRST, cpu_share=0.95))[0]


def test_percentiles_interpolate():
    assert [percentile([1.0, 2.0, 4.0], q) for q in (0, 50, 75, 100)] == [1, 2, 3, 4]
    assert summary([], [50]) == {}
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_ratio_and_its_interval():
    ratio, (low, high) = bootstrap_ratio([2.0, 2.2, 1.8, 2.1], [1.0, 1.1, 0.9, 1.0])
    assert ratio == pytest.approx(2.02, abs=0.03)
    assert 1.9 < low <= ratio <= high < 2.2
    assert bootstrap_ratio([3.0], [1.5]) == (2.0, (2.0, 2.0))
    # Rounds in which everything doubles change no ratio.
    assert bootstrap_ratio([2.0, 4.0], [1.0, 2.0])[1] == (2.0, 2.0)
    with pytest.raises(ValueError, match="1 and 2 rounds"):
        bootstrap_ratio([1.0], [1.0, 2.0])
