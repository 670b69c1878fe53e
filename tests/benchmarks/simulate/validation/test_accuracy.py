"""The verdict of a validation, given the uncertainty of the measured figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.benchmarks.report.record import Metric, Point
from ostinato.benchmarks.simulate.validation.accuracy import (
    COMPARED,
    Accuracy,
    accuracy_notes,
    classify,
    compare,
    interval,
)

EXACT = (99.0, 100.0, 101.0, 100.0, 98.0, 102.0, 100.0, 100.0)
WIDE = (60.0, 70.0, 90.0, 100.0, 100.0, 130.0, 150.0, 400.0)


def point(runs: tuple[float, ...], predicted: float) -> Point:
    """A validation in which every figure has these measured rounds and this prediction."""
    metrics = {name: Metric(100.0, "ms", "lower", runs=runs) for name in COMPARED}
    metrics |= {f"{name}_predicted": Metric(predicted, "ms", "lower") for name in COMPARED}
    return Point(label="steady", parameters={}, metrics=metrics)


@pytest.mark.parametrize(
    ("runs", "predicted", "accuracy"),
    [
        (EXACT, 100.0, Accuracy.within),
        (EXACT, 109.0, Accuracy.within),
        (EXACT, 111.0, Accuracy.missed),
        (EXACT, 85.0, Accuracy.missed),
        (WIDE, 100.0, Accuracy.unknown),  # within the uncertainty of the measurement
        (WIDE, 140.0, Accuracy.unknown),
        (WIDE, 170.0, Accuracy.missed),  # more than a tenth above the median's upper bound, 150
        (WIDE, 60.0, Accuracy.missed),
    ],
)
def test_a_figure_that_is_not_known_confirms_nothing(
    runs: tuple[float, ...], predicted: float, accuracy: Accuracy
):
    assert classify(point(runs, predicted), "itl_p99", 0.1) is accuracy


def test_only_what_is_missed_is_in_the_list():
    points = [point(EXACT, 120.0), point(WIDE, 120.0), point(EXACT, 105.0)]
    assert compare(points, 0.1) == [f"steady {name} (+20%)" for name in COMPARED]
    lines = accuracy_notes(points, 0.1)
    assert lines[0] == (
        "5 of 15 predictions are within 10% of the measured median; for 5 of them the median itself"
        " is known to 10%"
    )
    assert lines[1].startswith("missed: steady output_throughput (+20%)")
    assert lines[2].startswith("unknown: steady output_throughput (+20%)")


def test_the_median_lies_in_the_interval_nine_times_of_ten():
    # With eight rounds the smallest and the largest can be left out; with five, none can.
    assert interval(WIDE) == (70.0, 150.0)
    assert interval(WIDE[:5]) == (60.0, 100.0)
    assert interval(tuple(range(1, 21))) == (6, 15)
    assert interval((3.0,)) == (3.0, 3.0)


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=30))
def test_an_interval_is_around_the_median(values: list[float]):
    low, high = interval(values)
    ordered = sorted(values)
    middle = ordered[(len(values) - 1) // 2]
    assert low <= middle <= high
