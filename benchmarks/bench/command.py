"""`run bench`: runs one kind of measurement, writes its record, prints and plots it.

Each kind is a function from the configuration to a `Record`. The record is written as JSON, printed
as a table and plotted. With `bench.append` it is also appended to a history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.report.html_report import write_report
from ostinato.benchmarks.report.record import (
    Metric,
    Record,
    append_record,
    output_path,
    write_record,
)
from ostinato.benchmarks.report.tables import print_record
from ostinato.conf.environment import expand_user, require_writable
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.bench_schema import BenchKind

__all__ = ("bench", "finish", "measure_kind")

_KINDS = {
    BenchKind.throughput: "throughput:throughput",
    BenchKind.serve: "serve:serve",
    BenchKind.startup: "startup:startup",
    BenchKind.latency: "latency:latency",
    BenchKind.prefix: "prefix:prefix",
    BenchKind.determinism: "determinism:determinism",
    BenchKind.speculation: "speculation_rounds:speculation",
    BenchKind.ops: "ops:ops",
    BenchKind.compare: "compare:compare",
    BenchKind.history: "history:history",
}


def bench(config: RunConfig, overrides: Sequence[str] = (), config_dir: str | None = None) -> int:
    """Run the measurement of `bench.kind`; returns 0 if a point has results, else 1.

    A point has no results if all its requests failed.

    Args:
        config: the configuration.
        overrides: the overrides that it was made from; `compare` adds to them.
        config_dir: a directory with further options.

    Raises:
        ConfigError: the measurement is not possible with these settings.
        StartupError: an engine cannot start.
    """
    path = output_path(config.bench.output, config.bench.kind.value)
    if config.bench.append:
        require_writable(expand_user(config.bench.append), "bench.append")
    record = measure_kind(config, BenchContext(overrides, config_dir))
    return finish(record, config, path)


def measure_kind(config: RunConfig, context: BenchContext) -> Record:
    """Run the measurement of `bench.kind`; returns its record.

    Raises:
        ConfigError, StartupError: as `bench`.
    """
    module, _, name = _KINDS[config.bench.kind].partition(":")
    function = getattr(import_module(f"ostinato.benchmarks.bench.{module}"), name)
    try:
        return function(config, context)
    finally:
        context.show("")


def finish(record: Record, config: RunConfig, path: Path) -> int:
    """Write, append, print and plot a record; returns the exit code."""
    write_record(record, path)
    if config.bench.append:
        append_record(record, expand_user(config.bench.append))
    files = []
    if config.bench.report:
        files = write_report(record, path)
    print_record(record, path, files)
    return 0 if any(_has_success(point.metrics) for point in record.points) else 1


def _has_success(metrics: Mapping[str, Metric]) -> bool:
    completed = metrics.get("completed")
    return bool(metrics) and (completed is None or completed.value > 0)
