"""Prints a result: title, figures, errors, notes and paths. Tables have at most 100 columns.

Up to four points with short labels are printed side by side, with one metric in a row. If they do
not fit the width of the terminal, they are divided among several tables. Other points are printed
one below the other in one table, with the most important metrics only.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ostinato.benchmarks.report.record import Metric, Point, Record

__all__ = (
    "HEADLINES",
    "format_metric",
    "headlines_of",
    "median_and_range",
    "print_record",
    "table_console",
    "title_of",
)

_NARROWEST, _WIDEST = 80, 100
_MAX_COLUMNS, _MAX_LABEL = 4, 36  # points side by side, characters of their headings
_MAX_NAME = 50  # characters of a point's name in a row

# The metrics of each kind, in order. Kinds that are not listed show all their metrics.
HEADLINES: dict[str, Sequence[str]] = {
    "serve": (
        *("completed", "failed", "duration", "input_tokens", "output_tokens"),
        *("request_throughput", "goodput", "slo_attainment"),
        *("output_throughput", "total_throughput", "peak_output_throughput", "peak_concurrency"),
        *(f"{name}_{part}" for name in ("ttft", "tpot", "itl") for part in ("mean", "p50", "p99")),
        *("e2e_mean", "e2e_p50", "e2e_p99", "client_queue_p99", "host_gap", "padding_share"),
        *("steps_captured", "prefix_hit_rate", "kv_usage_peak", "preemptions"),
        "energy_per_output_token",
    ),
    "latency": (
        *("duration", "time_per_output_token", "output_throughput", "total_throughput"),
        *("host_gap", "padding_share", "roofline_share", "energy_per_output_token"),
        *("read_bandwidth", "other_cpu"),
    ),
    "prefix": (
        *("ttft_cold", "ttft_cached", "duration", "output_throughput", "total_throughput"),
        *("prefix_hit_rate", "host_gap", "read_bandwidth", "other_cpu"),
    ),
    "compare": (
        *("completed", "failed", "output_throughput", "output_throughput_ratio", "goodput"),
        *("goodput_ratio", "ttft_p50", "ttft_p50_ratio", "ttft_p99", "tpot_p50"),
        *("tpot_p50_ratio", "itl_p50", "itl_p50_ratio", "itl_p99", "itl_p99_ratio"),
    ),
    "throughput": (
        *("decode_rate", "ttft", "duration", "output_throughput", "total_throughput"),
        *("cached_prompt_tokens", "host_gap", "padding_share", "steps_captured"),
        *("roofline_share", "energy_per_output_token", "read_bandwidth", "other_cpu"),
    ),
}
# The figures in a table of many points.
_FEW: dict[str, Sequence[str]] = {
    "serve": (
        *("output_throughput", "goodput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "failed"),
    ),
    "throughput": ("output_throughput", "decode_rate", "ttft", "host_gap", "roofline_share"),
    "latency": ("duration", "time_per_output_token", "output_throughput", "roofline_share"),
    "ops": ("median", "roofline_share", "bandwidth", "rate", "best"),
    "compare": ("output_throughput", "output_throughput_ratio", "ttft_p50", "itl_p50"),
    "history": (
        *("output_throughput", "ttft_p50", "itl_p50", "decode_rate", "ready"),
        *("ttft_cached", "time_per_output_token"),
    ),
}


def headlines_of(record: Record) -> list[str]:
    """Names of the metrics to show, in order."""
    there = dict.fromkeys(name for point in record.points for name in point.metrics)
    wanted = HEADLINES.get(record.kind)
    return list(there) if wanted is None else [name for name in wanted if name in there]


def format_metric(metric: Metric) -> str:
    """About three digits, with the range of several runs: "42.1 [40.0-43.0]"; shares in percent."""
    scale = 100 if metric.unit == "share" else 1
    value = metric.value * scale
    digits = 0 if abs(value) >= 1000 or value == int(value) else 1 if abs(value) >= 10 else 2
    suffix = "%" if metric.unit == "share" else ""
    middle = f"{value:,.{digits}f}{suffix}"
    low, high = (pick(metric.runs or (metric.value,)) * scale for pick in (min, max))
    if low == high:
        return middle
    return f"{middle} [{low:,.{digits}f}-{high:,.{digits}f}]"


def median_and_range(values: Sequence[float]) -> str:
    """Median, and the range of several values, in about three digits: "42.1 [40.0-43.0]"."""
    median = statistics.median(values)
    digits = 0 if median >= 1000 else 1 if median >= 10 else 2
    middle = f"{median:,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):,.{digits}f}-{max(values):,.{digits}f}]"


def title_of(record: Record) -> str:
    """The kind of measurement, the model and the machine, in one line."""
    conditions: dict[str, Any] = record.conditions
    machine = conditions["machine"]
    commit, *changes = (conditions["commit"] or "unknown").split("-")
    config = conditions.get("config", {})
    model, where = conditions["model"], ", ".join(machine["gpus"]) or machine["cpu"]
    if record.kind == "serve":  # another server may serve any model, anywhere
        model = config.get("load", {}).get("url") or model
    if record.kind == "simulate" and (device := config.get("simulate", {}).get("device")):
        where = f"a described {device}, computed on {where}"
    return (
        f"{record.kind}: {model} on {where}, "
        f"{conditions['threads']} threads, torch {conditions['versions'].get('torch')}, commit "
        f"{'-'.join([commit[:12], *changes])}"
    )


def table_console() -> Console:
    """Standard output for tables: as wide as the terminal, within limits."""
    console = Console(highlight=False)
    width = console.width if console.is_terminal else _WIDEST
    console.width = max(_NARROWEST, min(_WIDEST, width))
    return console


def print_record(record: Record, file: Path | None = None, others: Sequence[Path] = ()) -> None:
    """Print the table, the notes, and the paths of the result and its plots."""
    console = table_console()
    console.print(title_of(record), markup=False)
    measured = [point for point in record.points if point.metrics]
    if measured:
        for table in _tables(record, measured, headlines_of(record), console):
            console.print(table)
    for point in record.points:
        if point.error is not None:
            console.print(f"- {point.label} failed: {point.error}", markup=False)
    for note in record.notes:
        console.print(f"- {note}", markup=False)
    if file is not None:
        console.print(f"every figure and its conditions: {file}", markup=False, soft_wrap=True)
    if others:
        names = ", ".join(str(one) for one in others)
        console.print(f"report: {names}", markup=False, soft_wrap=True)


def _tables(
    record: Record, measured: Sequence[Point], names: Sequence[str], console: Console
) -> list[Table]:
    """Tables with points side by side, or one table with a row for each point."""
    if len(measured) <= _MAX_COLUMNS and all(len(p.label) <= _MAX_LABEL for p in measured):
        for count in range(len(measured), 0, -1):
            parts = [measured[k : k + count] for k in range(0, len(measured), count)]
            tables = [_side_by_side(part, names) for part in parts]
            if all(_fits(table, console) for table in tables):
                return tables
    shown = [name for name in _FEW.get(record.kind, names[:6]) if name in names]
    while not _fits(table := _rows(measured, shown), console) and len(shown) > 1:
        shown.pop()
    return [table]


def _fits(table: Table, console: Console) -> bool:
    wanted = Measurement.get(console, console.options.update(max_width=10_000), table)
    return wanted.maximum <= console.width


def _side_by_side(points: Sequence[Point], names: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for point in points:
        table.add_column(point.label, justify="right")
    table.add_column("unit", no_wrap=True)
    for name in names:
        cells = [_cell(point, name) for point in points]
        if not any(cells):
            continue
        unit = next(p.metrics[name].unit for p in points if name in p.metrics)
        table.add_row(name, *cells, "" if unit == "share" else unit)
    return table


def _cell(point: Point, name: str) -> str:
    """A figure; a ratio with its confidence interval."""
    if name not in point.metrics:
        return ""
    ratio = point.details.get("ratios", {}).get(name.removesuffix("_ratio"))
    if ratio is not None and name.endswith("_ratio"):
        return f"{ratio['ratio']:.2f} [{ratio['low']:.2f}-{ratio['high']:.2f}]"
    return format_metric(point.metrics[name])


def _changed(point: Point, name: str) -> str:
    """A figure of a history, with its change from the first comparable point."""
    if name not in point.metrics:
        return ""
    change = point.details["change"].get(name)
    median = format_metric(replace(point.metrics[name], runs=()))
    return f"{median} ({change:+.0%})" if change else median


def _rows(points: Sequence[Point], few: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("point", max_width=_MAX_NAME)
    for name in few:
        unit = next(p.metrics[name].unit for p in points if name in p.metrics)
        table.add_column(f"{name}\n{unit if unit != 'share' else '%'}", justify="right")
    for point in points:
        changes = point.details.get("change")
        cells = [_cell(point, name) if changes is None else _changed(point, name) for name in few]
        table.add_row(point.label, *cells)
    return table
