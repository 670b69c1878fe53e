"""Prints the record of a comparison with other engines as a table."""

from __future__ import annotations

import statistics
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.peers.driver_commands import OURS
from ostinato.benchmarks.report.tables import median_and_range

__all__ = ("print_comparison",)

_CLASSES = ("int8", "int4", "drafts")  # ends of engines' names
_WIDTH = 100


def print_comparison(record: dict[str, Any]) -> None:
    """Print the medians of all rounds of a record, one row for each part.

    Args:
        record: what `python -m ostinato.benchmarks.peers --json` writes. Records of earlier
            versions have no `rounds`. They were written when all rounds were complete.
    """
    conditions, results = record["conditions"], record["results"]
    names = list(conditions["ready_s"])
    ours = [name for name in names if name.startswith(OURS)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part")
    for name in (*names, *(f"{name} to the best peer" for name in ours), "GB/s"):
        table.add_column(name, justify="right")
    for part, unit in {result["part"]: result["unit"] for result in results}.items():
        of_part = [result for result in results if result["part"] == part]
        values = {
            name: [result["value"] for result in of_part if result["engine"] == name]
            for name in names
        }
        bandwidth = statistics.median(result["read_gb_s"] for result in of_part)
        table.add_row(
            f"{part}, {unit}",
            *(median_and_range(values[name]) for name in names),
            *(_ratio(part, values, name) for name in ours),
            f"{bandwidth:.0f}",
        )
    console = Console(width=max(_WIDTH, 24 * (len(names) + len(ours))), highlight=False)
    isa = conditions.get("isa")  # None in records of earlier versions too
    console.print(
        f"{conditions['model']} {conditions['dtype']}, {conditions['threads']} threads, "
        f"{conditions['cpu']}{f' limited to {isa}' if isa else ''}, "
        f"{conditions['busy_processes']} other busy processes",
        markup=False,
    )
    console.print(table)
    rounds = record.get("rounds")
    if rounds is not None and rounds["complete"] < rounds["asked"]:
        console.print(
            f"the run ended early: {rounds['complete']} of {rounds['asked']} rounds are complete"
        )
    console.print(
        f"medians of the rounds with ranges; a ratio above 1 means that {OURS} is faster",
        markup=False,
    )


def _ratio(part: str, values: dict[str, list[float]], own: str) -> str:
    """The median over the rounds of the ratio of `own` to the best peer of its class."""
    peers = [name for name in values if not name.startswith(OURS) and _class(name) == _class(own)]
    if not peers:
        return ""
    best = min if part == "ttft" else max
    ratios = []
    for number, ours in enumerate(values[own]):
        peer = best(values[name][number] for name in peers)
        ratios.append(peer / ours if part == "ttft" else ours / peer)
    return median_and_range(ratios)


def _class(name: str) -> str:
    """The class of an engine by its name; "" = unquantised and without drafts."""
    last = name.rpartition("-")[2]
    return last if last in _CLASSES else ""
