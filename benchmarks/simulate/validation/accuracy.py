"""Compares predicted with measured metrics. The spread of the measurements is considered."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import comb

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.report.record import Point, Record

__all__ = (
    "COMPARED",
    "Accuracy",
    "accuracy_notes",
    "classify",
    "compare",
    "interval",
    "print_accuracy",
)

COMPARED = ("output_throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
_SURE = 0.9  # confidence of the interval of the median


class Accuracy(StrEnum):
    """The accuracy of a prediction."""

    within = ""  # within the tolerance of the measured median
    missed = "missed"
    unknown = "unknown"  # measured figures differ too much to confirm it, and do not refute it


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 90 % confidence interval of the median of the distribution of `values`.

    It is the narrowest interval between two order statistics with that confidence. With too few
    values it is the whole range, and the confidence is lower.
    """
    ordered, count = sorted(values), len(values)
    outside, left_out = 0.5 ** (count - 1), 0
    while (more := outside + comb(count, left_out + 1) * 0.5 ** (count - 1)) <= 1.0 - _SURE:
        outside, left_out = more, left_out + 1
    return ordered[left_out], ordered[-1 - left_out]


def classify(point: Point, figure: str, tolerance: float) -> Accuracy:
    """Compare the prediction of a figure with the measurements of the rounds.

    If the interval of the measured median is wider than the tolerance, it cannot confirm a
    prediction. It can still refute one that is too far from the whole interval.
    """
    measured = point.metrics[figure]
    low, high = interval(measured.runs)
    if max(high / measured.value - 1.0, 1.0 - low / measured.value) > tolerance:
        predicted = point.metrics[f"{figure}_predicted"].value
        is_near = low * (1.0 - tolerance) <= predicted <= high * (1.0 + tolerance)
        return Accuracy.unknown if is_near else Accuracy.missed
    return Accuracy.within if abs(_error(point, figure)) <= tolerance else Accuracy.missed


def compare(points: Sequence[Point], tolerance: float) -> list[str]:
    """Descriptions of the figures whose prediction misses by more than `tolerance`."""
    return _with_accuracy(points, tolerance, Accuracy.missed)


def _with_accuracy(points: Sequence[Point], tolerance: float, wanted: Accuracy) -> list[str]:
    return [
        f"{point.label} {figure} ({_error(point, figure):+.0%})"
        for point in points
        for figure in COMPARED
        if classify(point, figure, tolerance) is wanted
    ]


def accuracy_notes(points: Sequence[Point], tolerance: float) -> list[str]:
    """Sentences with the number of figures of each accuracy, and their names."""
    found = {one: _with_accuracy(points, tolerance, one) for one in Accuracy}
    count = sum(len(texts) for texts in found.values())
    near = sum(abs(_error(point, one)) <= tolerance for point in points for one in COMPARED)
    lines = [
        f"{near} of {count} predictions are within {tolerance:.0%} of the measured median; for "
        f"{len(found[Accuracy.within])} of them the median itself is known to {tolerance:.0%}"
    ]
    if missed := found[Accuracy.missed]:
        lines.append(f"missed: {', '.join(missed)}")
    if unknown := found[Accuracy.unknown]:
        lines.append(
            f"unknown: {', '.join(unknown)}; the rounds of the real server differ too much on this "
            f"machine to determine their median to within {tolerance:.0%}"
        )
    lines.append(
        "measured: median of the rounds; known to: 90 % confidence interval of that median; "
        "rounds: the smallest and the largest"
    )
    return lines


def _error(point: Point, figure: str) -> float:
    measured, predicted = point.metrics[figure], point.metrics[f"{figure}_predicted"]
    return predicted.value / max(measured.value, 1e-9) - 1.0


def print_accuracy(record: Record, tolerance: float) -> None:
    """The table, and the record's notes."""
    console = Console(width=130, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    texts = ("workload", "figure", "unit", "")
    numbers = ("predicted", "measured", "known to", "rounds", "error")
    for heading in (*texts[:3], *numbers, texts[3]):
        table.add_column(heading, justify="left" if heading in texts else "right", no_wrap=True)
    for point in record.points:
        load = f"{point.parameters['concurrency']} at a time"
        if point.parameters["rate"]:
            load = f"{point.parameters['rate']:g} requests/s"
        labels = iter((point.label, load, f"{point.metrics['completed'].value:.0f} requests"))
        for figure in COMPARED:
            measured, predicted = point.metrics[figure], point.metrics[f"{figure}_predicted"]
            table.add_row(
                next(labels, ""),
                figure,
                measured.unit,
                f"{predicted.value:.1f}",
                f"{measured.value:.1f}",
                _relative_range(measured.value, *interval(measured.runs)),
                _relative_range(measured.value, min(measured.runs), max(measured.runs)),
                f"{_error(point, figure):+.1%}",
                classify(point, figure, tolerance).value,
            )
    console.print(table)
    for note in record.notes:
        console.print(f"- {note}", markup=False)


def _relative_range(value: float, low: float, high: float) -> str:
    return f"{low / max(value, 1e-9) - 1:+.0%} .. {high / max(value, 1e-9) - 1:+.0%}"
