"""`run bench history`: results of several runs or commits beside each other.

    run bench serve load.concurrency=[8] bench.append=history.jsonl      # now and then
    run bench history bench.files=[history.jsonl]

Results of one kind whose points have the same parameters are one line; each metric is shown with
its change from the first.
"""

from __future__ import annotations

import glob
from dataclasses import replace
from pathlib import Path

from ostinato.benchmarks.context import BenchContext
from ostinato.benchmarks.record import Point, Record, conditions_of, read_records
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import EngineConfig

__all__ = ("history",)


def history(config: EngineConfig, context: BenchContext) -> Record:
    """Every point of every result, oldest first, labelled with its commit and time.

    Raises:
        ConfigError: no file, or one that is no result.
    """
    paths = [
        Path(found)
        for pattern in config.bench.files
        for found in sorted(glob.glob(str(Path(pattern).expanduser()))) or [pattern]
    ]
    if not paths:
        raise ConfigError(
            "bench.files names no result: bench.files=[history.jsonl], or a pattern such as "
            "bench.files=['outputs/bench/*.json']"
        )
    records = [record for path in paths for record in read_records(path)]
    records.sort(key=lambda record: (record.kind, record.conditions["time"]))
    points: list[Point] = []
    for record in records:
        commit = (record.conditions["commit"] or "unknown").replace("-dirty", "+")[:9]
        when = record.conditions["time"][:16].replace("T", " ")
        for point in record.points:
            parameters = {"kind": record.kind, **point.parameters, "commit": commit, "time": when}
            label = f"{record.kind} {point.label}, {commit} {when}"
            points.append(replace(point, label=label, parameters=parameters, details={}))
    points.sort(key=lambda point: _identity(point))  # stable: time stays the order within
    machines = {record.conditions["machine"]["cpu"] for record in records}
    notes = []
    if len(machines) > 1:
        notes.append(f"different machines: {', '.join(sorted(machines))}")
    _add_changes(points)
    return Record(kind="history", conditions=conditions_of(config), points=points, notes=notes)


def _identity(point: Point) -> str:
    return repr([v for k, v in point.parameters.items() if k not in ("commit", "time")])


def _add_changes(points: list[Point]) -> None:
    """Put into each point how its figures relate to the first one's with the same parameters."""
    first: dict[str, Point] = {}
    for point in points:
        reference = first.setdefault(_identity(point), point)
        point.details["change"] = {
            name: metric.value / reference.metrics[name].value - 1
            for name, metric in point.metrics.items()
            if metric.better and name in reference.metrics and reference.metrics[name].value
        }
