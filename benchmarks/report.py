"""What `run bench` measured, as a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ("Measurement", "print_report", "summary")

_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One repetition of one part, with the state of the machine around it."""

    part: str
    seconds: float  # until the last token of all requests
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens that the prefix cache had
    first_token_s: float | None  # of a single request
    decode_tok_s: float | None  # of a single request: (n - 1) tokens after the first
    overhead: float  # share of the steps' time that is not the model's
    num_steps: int
    bandwidth_gb_s: float  # of a memory read just before
    other_cpu: float  # share of the cores that other programs had

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def total_tok_s(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds


# The figures of a part: (words, unit, value or None when the part has none).
_FIGURES: dict[str, tuple[str, str, Callable[[Measurement], float | None]]] = {
    "decode": ("decode, one stream", "tok/s", lambda m: m.decode_tok_s),
    "first_token": ("time to first token", "ms", lambda m: _ms(m.first_token_s)),
    "seconds": ("all requests", "s", lambda m: None if m.first_token_s is not None else m.seconds),
    "output": (
        "output",
        "tok/s",
        lambda m: None if m.first_token_s is not None else m.output_tok_s,
    ),
    "total": (
        "prompt + output",
        "tok/s",
        lambda m: None if m.first_token_s is not None else m.total_tok_s,
    ),
}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def summary(values: Sequence[float]) -> str:
    """Median, and the range when there is one, in about three digits: "42.1 [40.0-43.0]"."""
    median = statistics.median(values)
    digits = 0 if median >= 1000 else 1 if median >= 10 else 2
    middle = f"{median:,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):,.{digits}f}-{max(values):,.{digits}f}]"


def print_report(record: dict[str, Any], measurements: Sequence[Measurement], file: Path) -> None:
    """The table, in 100 columns.

    Args:
        record: what is written to `file`.
        measurements: all repetitions of all parts.
        file: named in the last line.
    """
    console = Console(width=_WIDTH, highlight=False)
    conditions = record["conditions"]
    commit, *changes = (conditions["commit"] or "unknown").split("-")
    console.print(
        f"{conditions['model']} on {', '.join(conditions['gpus']) or conditions['cpu']}, "
        f"{conditions['threads']} threads, torch {conditions['versions'].get('torch')}, "
        f"commit {'-'.join([commit[:12], *changes])}",
        markup=False,
    )
    console.print(_table(measurements))
    phases = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in conditions["startup_phases_s"].items()
    )
    console.print(
        f"ready in {conditions['startup_s']:.1f} s ({phases}); peak memory "
        f"{record['peak_rss_mib']} MiB{', probes included' * record['peak_rss_contains_probes']}; "
        f"compilations after the start: {_late_compiles(record['late_compiles'])}",
        markup=False,
    )
    console.print(
        "overhead: share of the steps' time outside the model; GB/s: memory read beside each "
        "figure; others: cores' share of other programs, the highest"
    )
    for note in record["notes"]:
        console.print(f"- {note}", markup=False)
    console.print(f"every measurement and its conditions: {file}", markup=False, soft_wrap=True)


def _late_compiles(entries: Sequence[dict[str, Any]]) -> str:
    """Steps in which something compiled: "0", or "3 (c++ at tokens=5,seqs=2: 3)"."""
    total = sum(entry["count"] for entry in entries)
    if not total:
        return "0"
    parts = (f"{entry['what']} at {entry['shape']}: {entry['count']}" for entry in entries)
    return f"{total} ({'; '.join(parts)})"


def _table(measurements: Sequence[Measurement]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, side in (
        ("part", "left"),
        ("figure", "left"),
        ("median [min-max]", "right"),
        ("unit", "left"),
        ("overhead", "right"),
        ("GB/s", "right"),
        ("others", "right"),
    ):
        table.add_column(heading, justify=side, no_wrap=True)  # pyright: ignore[reportArgumentType]
    for part in dict.fromkeys(measured.part for measured in measurements):
        repetitions = [measured for measured in measurements if measured.part == part]
        state = (
            f"{statistics.median(m.overhead for m in repetitions):.1%}",
            summary([m.bandwidth_gb_s for m in repetitions]),
            f"{max(m.other_cpu for m in repetitions):.0%}",
        )
        for words, unit, value in _FIGURES.values():
            values = [found for m in repetitions if (found := value(m)) is not None]
            if values:
                table.add_row(part, words, summary(values), unit, *state)
                part, state = "", ("", "", "")
    return table
