"""Writes a result as one self-contained HTML file, with its plots as PNG files beside it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from ostinato.benchmarks.report.plot_style import THEME
from ostinato.benchmarks.report.plots import Plot, draw
from ostinato.benchmarks.report.record import Record
from ostinato.benchmarks.report.tables import format_metric, headlines_of, title_of

__all__ = ("render", "write_report")

_LOG = logging.getLogger(__name__)
_PNG_DPI = 150


def write_report(record: Record, path: Path) -> list[Path]:
    """Write `<path>.html` and a PNG for each plot beside the result at `path`.

    Returns:
        The paths of the files. Without matplotlib there are no plots, and a warning is logged.
    """
    try:
        plots = draw(record)
    except ImportError:
        _LOG.warning('plots need matplotlib: pip install "ostinato[bench]"')
        plots = []
    page = path.with_suffix(".html")
    page.write_text(render(record, plots), encoding="utf-8")
    files = [page]
    for plot in plots:
        file = path.with_name(f"{path.stem}-{plot.name}.png")
        plot.figure.savefig(file, dpi=_PNG_DPI)
        files.append(file)
    return files


def render(record: Record, plots: Sequence[Plot]) -> str:
    """The page as HTML."""
    template = _templates().get_template("report.html.jinja")
    conditions: dict[str, Any] = dict(record.conditions)
    config = conditions.pop("config")
    return template.render(
        record=record,
        subject=title_of(record).partition(": ")[2],
        time=conditions["time"].replace("T", " ").removesuffix("+00:00") + " UTC",
        failed=[f"{p.label}: {p.error}" for p in record.points if p.error is not None],
        metrics=_metrics(record),
        plots=[{"title": one.title, "text": one.text, "svg": _svg(one)} for one in plots],
        conditions=[
            (_condition_name(name), _words(value))
            for name, value in conditions.items()
            if not _is_empty(value)
        ],
        config=json.dumps(config, indent=2),
    )


def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(("html", "jinja")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )


class _MetricsTable(NamedTuple):
    heads: list[str]
    rows: list[list[str]]


def _metrics(record: Record) -> _MetricsTable | None:
    """A row for each metric, or for each point if there are many. None = no measurements."""
    points = [point for point in record.points if point.metrics]
    if not points:
        return None
    names = headlines_of(record)
    units = {n: next(p.metrics[n].unit for p in points if n in p.metrics) for n in names}
    heads = [
        n.replace("_", " ") + (f", {u}" if u not in ("", "share") else "") for n, u in units.items()
    ]
    cells = [[format_metric(p.metrics[n]) if n in p.metrics else "" for n in names] for p in points]
    labels = [point.label for point in points]
    if len(points) <= 6:
        columns = zip(*cells, strict=True)
        rows = [[head, *column] for head, column in zip(heads, columns, strict=True)]
        return _MetricsTable(["", *labels], rows)
    rows = [[label, *row] for label, row in zip(labels, cells, strict=True)]
    return _MetricsTable(["", *heads], rows)


def _svg(plot: Plot) -> str:
    """A plot's SVG after its opening "<svg", in the colours of the page's theme."""
    buffer = io.StringIO()
    metadata = {"Date": None}
    plot.figure.savefig(buffer, format="svg", dpi=_PNG_DPI, metadata=metadata, transparent=True)
    text = buffer.getvalue()
    for colour, variable in THEME.items():
        text = text.replace(colour, f"var({variable})")
    return text[text.index("<svg") + len("<svg") :]


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _condition_name(name: str) -> str:
    """A key in words, followed by its unit: "startup_s" is "startup (s)"."""
    head, _, tail = name.rpartition("_")
    unit = {"s": "s", "gib": "GiB", "mib": "MiB"}.get(tail)
    return name.replace("_", " ") if unit is None else f"{head.replace('_', ' ')} ({unit})"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{_condition_name(key)} {_words(inner)}"
            for key, inner in value.items()
            if not _is_empty(inner)
        )
    if isinstance(value, list):
        return " ".join(map(_words, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
