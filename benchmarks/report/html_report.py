"""Writes a result as one self-contained HTML file, with its plots as PNG files beside it."""

from __future__ import annotations

import html
import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.benchmarks.report.plot_style import THEME
from ostinato.benchmarks.report.plots import Plot, draw
from ostinato.benchmarks.report.record import Record
from ostinato.benchmarks.report.tables import format_metric, headlines_of, title_of

__all__ = ("render", "write_report")

_LOG = logging.getLogger(__name__)
_PNG_DPI = 150
_STYLE = """
:root { color-scheme: light dark; --ground: #f5f6f7; --card: #fff; --ink: #22292f; --soft: #4a545c;
  --line: #e1e5e8; --link: #2f6f9f; --axis: #8a949d; --grid: #e3e7eb; --warn: #d1495b; }
@media (prefers-color-scheme: dark) { :root { --ground: #151819; --card: #1e2224; --ink: #e3e6e8;
  --soft: #a9b2b8; --line: #343b3f; --link: #7db7de; --axis: #727c83; --grid: #32393d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  margin: 0; }
main { max-width: 980px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 10px; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 18px 20px; margin: 16px 0; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--card); }
ul { margin: 0; padding-left: 20px; } li { margin: 2px 0; overflow-wrap: anywhere; }
.warning { border-left: 4px solid var(--warn); }
.conditions td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.conditions td:first-child { color: var(--soft); overflow-wrap: normal; }
.plot { overflow-x: auto; } svg { width: 100%; min-width: 600px; height: auto; display: block; }
pre { font-size: 12px; overflow-x: auto; background: var(--ground); padding: 12px;
  border-radius: 6px; }
summary { cursor: pointer; color: var(--link); }
@media (max-width: 600px) { main { padding: 16px 8px 40px; } section { padding: 14px 12px; }
  th, td { padding-right: 10px; } td:first-child, th { white-space: normal; } }
@media print { section { break-inside: avoid; } }
"""


def write_report(record: Record, path: Path) -> list[Path]:
    """Write `<path>.html` and a PNG for each plot beside the result at `path`.

    Returns:
        The files; without matplotlib the HTML alone, and a line in the log that says so.
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
    """The page."""
    when = record.conditions["time"].replace("T", " ").removesuffix("+00:00") + " UTC"
    parts = [
        f"<h1>run bench {_text(record.kind)}</h1>",
        f"<p>{_text(title_of(record).partition(': ')[2])}; {_text(when)}</p>",
    ]
    if record.notes:
        parts.append(f'<section class="warning"><h2>Notes</h2>{_list(record.notes)}</section>')
    failed = [f"{p.label}: {p.error}" for p in record.points if p.error is not None]
    if failed:
        parts.append(f'<section class="warning"><h2>Failed points</h2>{_list(failed)}</section>')
    parts.append(f"<section><h2>Figures</h2>{_figures(record)}</section>")
    for plot in plots:
        parts.append(
            f"<section><h2>{_text(plot.title)}</h2><p>{_text(plot.text)}</p>"
            f'<div class="plot">{_svg(plot)}</div></section>'
        )
    parts.append(f"<section><h2>Conditions</h2>{_conditions(record)}</section>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>run bench {_text(record.kind)}</title><style>{_STYLE}</style></head>"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _figures(record: Record) -> str:
    """A row for each figure; for many points a row for each point."""
    points = [point for point in record.points if point.metrics]
    if not points:
        return "<p>Nothing was measured.</p>"
    names = headlines_of(record)
    units = {n: next(p.metrics[n].unit for p in points if n in p.metrics) for n in names}
    heads = [
        n.replace("_", " ") + (f", {u}" if u not in ("", "share") else "") for n, u in units.items()
    ]
    cells = [[format_metric(p.metrics[n]) if n in p.metrics else "" for n in names] for p in points]
    labels = [point.label for point in points]
    if len(points) <= 6:
        rows = [
            [head, *column] for head, column in zip(heads, zip(*cells, strict=True), strict=True)
        ]
        return _table(["", *labels], rows)
    return _table(["", *heads], [[label, *row] for label, row in zip(labels, cells, strict=True)])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{_text(one)}</th>" for one in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f'<table class="{kind}">{top}<tbody>{body}</tbody></table>'


def _svg(plot: Plot) -> str:
    buffer = io.StringIO()
    metadata = {"Date": None}
    plot.figure.savefig(buffer, format="svg", dpi=_PNG_DPI, metadata=metadata, transparent=True)
    text = buffer.getvalue()
    for colour, variable in THEME.items():
        text = text.replace(colour, f"var({variable})")
    name = _text(f"{plot.title}. {plot.text}")
    return f'<svg role="img" aria-label="{name}"' + text[text.index("<svg") + 4 :]


def _conditions(record: Record) -> str:
    conditions: dict[str, Any] = dict(record.conditions)
    config = conditions.pop("config")
    rows = [
        [_condition_name(name), _words(value)]
        for name, value in conditions.items()
        if not _is_empty(value)
    ]
    dump = _text(json.dumps(config, indent=2))
    return (
        _table([], rows, "conditions")
        + f"<details><summary>resolved configuration</summary><pre>{dump}</pre></details>"
    )


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _condition_name(name: str) -> str:
    """A key in words, with its unit behind: "startup_s" is "startup (s)"."""
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
