"""The soak test: a real `run serve` under traffic of every kind, and checks afterwards.

    python -m ostinato.benchmarks.soak
    python -m ostinato.benchmarks.soak --minutes 10 --calm-minutes 2 --clients 250 --rate 4 \\
        --hostile 250 --kill-every 120 --libraries /tmp/libraries --json FILE
    python -m ostinato.benchmarks.soak --minutes 60 --seed 1 device.threads=1

Good clients send prompts of random lengths with random options, several completions and prompts at
once, and bad requests. Some of them disconnect in the middle of an answer. Client libraries that
are installed send requests of their own. With `--hostile`, hostile connections send broken, slow
and huge requests (`soak.hostile`). With `--kill-every`, the engine process is killed again and
again.

The checks:

- Nothing is compiled after the start. The log has no error.
- Every KV block is free at the end, and block accounting is consistent.
- Half of the valid requests that are neither streamed nor left by their client are sent again with
  `"speculation": false`. Both answers are equal, and the server has verified drafts. It has the
  default `speculation.method`, which is `auto` on a CPU.
- Every answer is as expected. None has a 5xx status other than a 503 with Retry-After, except
  answers of `/health` while a killed engine starts again.
- At the end, the server has no more temporary files than at the beginning. Numbers of open files,
  threads and processes have grown by at most `ALLOWED_GROWTH`.
- In runs of 100 seconds and more: memory grows by at most 32 MiB, `/health` answers within 100 ms,
  every kind of attack was made, and the p99 of good clients is at most twice what it was before the
  hostile connections began.

At the end the slowest requests of good clients and libraries are printed: up to ten that were under
way during a restart, and ten others. Each request has the phases that the server logs: preparation,
queue, first token, further tokens.

The KV cache is so small that sequences wait and are preempted. A model other than the demo needs
its own `cache.memory_gib`. Needs `httpx`, of the extra `test`. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.soak.libraries.client_libraries import LIBRARIES, install
from ostinato.benchmarks.soak.soak_record import record_of
from ostinato.benchmarks.soak.soak_run import SoakPlan, measure

__all__ = ("main", "run_soak")


def run_soak(plan: SoakPlan) -> dict[str, Any]:
    """Run one soak test; returns its record (see `record_of`).

    Raises:
        RuntimeError: the server or a process beside the test did not start, or failed.
        subprocess.TimeoutExpired: a process beside the test did not end.
    """
    return record_of(plan, measure(plan))


def _counted(counts: dict[str, Any]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def _print(record: dict[str, Any]) -> None:
    console = Console(width=110, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check")
    table.add_column("holds")
    table.add_column("figures", overflow="fold")
    statuses = ", ".join(f"{status}: {count}" for status, count in record["statuses"].items())
    figures = (
        record["late_compiles"] or 0,
        f"{record['leaked_blocks']:g} in use at the end",
        statuses,
        ", ".join(
            f"{name} {before} before, {after} after"
            for name, (before, after) in record["resources"].items()
        ),
        ", ".join(
            f"{name} {sizes['growth_mib']:+.1f} MiB" for name, sizes in record["memory"].items()
        ),
        "; ".join(
            f"{name}: {one['answers']:.0f}, p50 {one['p50_s']:.2f}, p99 {one['p99_s']:.2f} s"
            for name, one in record["latency"].items()
        ),
        "; ".join(
            f"{name}: {one['polls']:.0f}, p99 {one['p99_ms']:.1f}, at most {one['max_ms']:.0f} ms"
            for name, one in record["health"].items()
        ),
        f"{_counted(record['exchanges'])}; {len(record['wrong'])} wrong",
        ", ".join(f"{name} {value:g}" for name, value in record["drafts"].items()),
        _counted(record["hostile"]["groups"]) or "none",
        f"{len(record['errors'])} errors, exit code {record['exit_code']}",
    )
    for (name, holds), text in zip(record["checks"].items(), figures, strict=True):
        table.add_row(name, "yes" if holds else "NO", str(text))
    console.print(table)
    rows = {
        "hostile": _counted(record["hostile"]["acts"]),
        "their answers": str(record["hostile"]["statuses"]),
        "libraries": str(record["libraries"]),
        "restarts": str(dict(zip(record["kills"], record["restarts_s"], strict=True))),
        "engine": ", ".join(f"{name} {value:g}" for name, value in record["engine"].items()),
    }
    for name, text in rows.items():
        console.print(f"{name}: {text}", markup=False)
    console.print(_slowest_table(record["slowest"]))
    for line in (*record["wrong"], *record["errors"]):
        console.print(f"- {line}", markup=False)


def _slowest_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="slowest good requests")
    for name in ("at s", "took s"):
        table.add_column(name, justify="right")
    for name in ("client", "request", "longest phase", "seconds of the phases", "beside, seconds"):
        table.add_column(name, overflow="fold")
    for row in rows:
        phases = ", ".join(f"{name} {value:g}" for name, value in row["phases"].items())
        phase = row["phase"] + (" (restart)" if row["in_restart"] else "")
        beside = "; ".join(f"{name} {seconds:g}" for name, seconds in row["beside"].items())
        times = (f"{row['at']:.0f}", f"{row['seconds']:.2f}")
        table.add_row(*times, row["client"], row["kind"], phase, phases, beside)
    return table


def main(arguments: list[str]) -> int:
    """Run the test and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long requests are sent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12, help="number of good clients")
    parser.add_argument(
        "--rate",
        type=float,
        default=0,
        help="requests per second of all good clients; 0 = as many as possible",
    )
    parser.add_argument("--hostile", type=int, default=0, help="number of hostile connections")
    parser.add_argument(
        "--hostile-rate", type=float, default=20, help="short attacks per second, all connections"
    )
    parser.add_argument(
        "--heavy-rate", type=float, default=0.2, help="heavy requests per second, all connections"
    )
    parser.add_argument(
        "--stall-cases", default="", help="a regular expression for names of heavy requests"
    )
    parser.add_argument(
        "--calm-minutes",
        type=float,
        default=0,
        help="minutes before attacks and kills begin; 0 = they begin at once",
    )
    parser.add_argument(
        "--kill-every", type=float, default=0, help="seconds between kills of the engine; 0 = none"
    )
    parser.add_argument(
        "--libraries", type=Path, help="install the client libraries here, and use them"
    )
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("overrides", nargs="*", help="configuration of the server")
    options = parser.parse_args(arguments)
    if options.libraries is not None:
        install(options.libraries)
    plan = SoakPlan(
        seconds=60 * options.minutes,
        seed=options.seed,
        num_clients=options.clients,
        rate=options.rate,
        calm_s=60 * options.calm_minutes,
        num_hostile=options.hostile,
        hostile_rate=options.hostile_rate,
        heavy_rate=options.heavy_rate,
        stall_cases=options.stall_cases,
        kill_every_s=options.kill_every,
        libraries=tuple(LIBRARIES),
        library_directory=options.libraries,
        overrides=tuple(options.overrides),
    )
    record = run_soak(plan)
    if options.json is not None:
        write_json(record, options.json)
    _print(record)
    return 0 if all(record["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
