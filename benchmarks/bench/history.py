"""`run bench history`: compares results of several runs or commits.

    run bench serve load.concurrency=[8] bench.append=history.jsonl      # now and then
    run bench history bench.files=[history.jsonl]

Points with the same kind, model, workload, number of threads and parameters are printed one below
the other. Each figure is shown with its change from the first such point. The notes list other
differences between their configurations.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.report.record import Point, Record, conditions_of, read_records
from ostinato.conf.environment import expand_user
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig

__all__ = ("history",)

_MAX_CHANGES = 5
# Settings that are not compared: those of the benchmark and its goals, those of the workload (it is
# part of `_what`), and those that differ between the points of one result.
_NOT_MEASURED = {"bench", "slo", "workload", "load.rates", "load.concurrency", "load.url"}


def history(config: RunConfig, context: BenchContext) -> Record:
    """Every point of every result with its commit and time; comparable points oldest first.

    Raises:
        ConfigError: `bench.files` is empty, or a file does not exist or is not a result.
    """
    paths = [
        Path(found)
        for pattern in config.bench.files
        for found in sorted(glob.glob(str(expand_user(pattern)))) or [pattern]
    ]
    if not paths:
        raise ConfigError(
            "bench.files names no result: set it, for example bench.files=[history.jsonl], or "
            "bench.files=['outputs/bench/*.json']"
        )
    records = [record for path in paths for record in read_records(path)]
    records.sort(key=lambda record: (record.kind, record.conditions["time"]))
    points: list[Point] = []
    models = {record.conditions["model"] for record in records}
    for record in records:
        commit = (record.conditions["commit"] or "unknown").replace("-dirty", "+")[:9]
        when = record.conditions["time"][:16].replace("T", " ")
        for point in record.points:
            parameters = {"kind": record.kind, **point.parameters, "commit": commit, "time": when}
            model = f" {record.conditions['model']}" if len(models) > 1 else ""
            label = f"{record.kind}{model} {point.label}, {commit} {when}"
            details = {"measured": _what(record)}
            points.append(replace(point, label=label, parameters=parameters, details=details))
    order = {key: n for n, key in enumerate(dict.fromkeys(_identity(point) for point in points))}
    # a stable sort: equal identities stay in the order of time
    points.sort(key=lambda point: order[_identity(point)])
    machines = {record.conditions["machine"]["cpu"] for record in records}
    notes = []
    if len(machines) > 1:
        notes.append(f"different machines: {', '.join(sorted(machines))}")
    notes += _differences(records)
    _add_changes(points)
    return Record(kind="history", conditions=conditions_of(config), points=points, notes=notes)


def _what(record: Record) -> dict[str, object]:
    """The facts that must be equal so that figures can be compared."""
    conditions = record.conditions
    workload = conditions["config"].get("workload")
    return {"model": conditions["model"], "threads": conditions["threads"], "workload": workload}


def _identity(point: Point) -> str:
    named = {k: v for k, v in point.parameters.items() if k not in ("commit", "time")}
    return json.dumps([named, point.details["measured"]], sort_keys=True)


def _differences(records: Sequence[Record]) -> list[str]:
    """For each result, the settings that differ from the first result with equal facts."""
    first: dict[str, dict[str, object]] = {}
    notes: list[str] = []
    for record in records:
        config = dict(_leaves(record.conditions["config"]))
        key = json.dumps([record.kind, _what(record)], sort_keys=True)
        reference = first.setdefault(key, config)
        # A key that only one of the commits has is not a difference between the runs.
        changed = [name for name in config if reference.get(name, config[name]) != config[name]]
        if changed:
            pairs = [f"{name}={config[name]} (was {reference[name]})" for name in changed]
            more = f" and {len(pairs) - _MAX_CHANGES} more" if len(pairs) > _MAX_CHANGES else ""
            when = record.conditions["time"][:16].replace("T", " ")
            notes.append(f"{record.kind} {when}: {', '.join(pairs[:_MAX_CHANGES])}{more}")
    return notes


def _leaves(section: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in _NOT_MEASURED:
            continue
        if isinstance(value, dict):
            yield from _leaves(cast(Mapping[str, object], value), f"{key}.")
        else:
            yield key, value


def _add_changes(points: list[Point]) -> None:
    """Add to each point the changes of its figures from the first point with the same identity."""
    first: dict[str, Point] = {}
    for point in points:
        reference = first.setdefault(_identity(point), point)
        point.details["change"] = {
            name: metric.value / reference.metrics[name].value - 1
            for name, metric in point.metrics.items()
            if metric.better and name in reference.metrics and reference.metrics[name].value
        }
