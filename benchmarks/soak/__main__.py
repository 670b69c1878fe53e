"""The soak test: a real `run serve` under traffic of every kind, and checks afterwards.

    python -m ostinato.benchmarks.soak
    python -m ostinato.benchmarks.soak --clients 250 --bad-clients 250 --calm-minutes 2 --minutes 10
    python -m ostinato.benchmarks.soak --kill-every 20 server.max_restarts=1000
    python -m ostinato.benchmarks.soak --minutes 60 --seed 1 --json FILE device.threads=1

Clients send prompts of random lengths with random options, several completions and prompts at once,
and bad requests; some disconnect in the middle of an answer. The checks: nothing compiled after the
start, every KV block is free and block accounting is consistent, no 5xx, no error in the log,
memory and file descriptors do not grow. With `--calm-minutes`, the p99 of good clients stays within
twice of what it was before the bad clients came. The KV cache is so small that sequences wait and
are preempted (a model other than the demo needs its own `cache.memory_gib`). Needs `httpx`, of the
extra `test`. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

import ostinato
from ostinato.benchmarks.machine.probes import commit_of
from ostinato.benchmarks.soak.clients import REPLY_S, ClientCounts, Faults, drive
from ostinato.benchmarks.soak.soak_server import SoakServer
from ostinato.runtime.file_limit import raise_file_limit
from ostinato.runtime.startup.machine_info import cpu_name, gpu_names, package_versions

__all__ = ("run_soak",)

# The KV cache is so small that sequences wait and are preempted.
_OVERRIDES = ("server.port=0", "cache.memory_gib=0.004")
_QUIET_S = 60.0
_FDS_KEPT = 16  # allowed growth of open files: pipes of the processes that check grammars
_WARM_SHARE = 0.3  # share of the time after which memory is expected to be constant
_GROWTH_MIB = 32.0  # allowed growth of a process after that, by its allocator
_GROWTH_FROM_S = 120.0  # in shorter runs memory growth is not checked
# Beginnings of the log's errors about an engine that was killed on purpose.
_SAID_OF_KILLS = ("the engine died: its process was killed", "flight recorder: the last")
_MOST_SLOWER = 2.0  # allowed ratio of the p99 of good requests with and without bad clients


def _latency(counts: ClientCounts, seconds: float, calm_s: float) -> dict[str, dict[str, float]]:
    """Seconds to whole answers of good clients, alone and among bad ones; {} = nothing to compare.

    The first and last tenth of the calm time do not count, because all clients begin at once, and
    late requests overlap with bad clients.
    """
    calm = [took for sent, took in counts.answered if 0.1 * calm_s <= sent <= 0.9 * calm_s]
    storm = [took for sent, took in counts.answered if calm_s <= sent <= seconds]
    if len(calm) < 2 or len(storm) < 2:
        return {}
    found = {}
    for name, series in (("calm", calm), ("storm", storm)):
        cuts = statistics.quantiles(series, n=100, method="inclusive")
        found[name] = {"answers": len(series), "p50_s": cuts[49], "p99_s": cuts[98]}
    return found


def _quiet_metrics(url: str) -> dict[str, float]:
    """`/metrics` by name and labels, when no request runs, or after a minute."""
    deadline = time.monotonic() + _QUIET_S
    while True:
        text = httpx.get(f"{url}/metrics", timeout=REPLY_S).text
        found = {
            "".join((sample.name, *(f" {k}={v}" for k, v in sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        unfinished = found["ostinato_requests_running"] + found["ostinato_requests_waiting"]
        if unfinished == 0 or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _quiet_fds(server: SoakServer, enough: int) -> int:
    """Open descriptors, when there are at most `enough`, or after a time for closing."""
    deadline = time.monotonic() + _QUIET_S
    while (count := server.num_fds()) > enough and time.monotonic() < deadline:
        time.sleep(0.2)
    return count


def _growth(memory: list[dict[str, float]], seconds: float) -> dict[str, dict[str, float]]:
    """Memory in MiB after the warm-up and at the end, each the median of a tenth of the time."""
    growth = {}
    for name in ("api", "engine"):
        series = [(row["at"], row[name]) for row in memory if name in row]
        begin, tenth = _WARM_SHARE * seconds, seconds / 10
        early = [mib for at, mib in series if begin <= at <= begin + tenth]
        late = [mib for at, mib in series if at >= seconds - tenth]
        if early and late:
            first, last = statistics.median(early), statistics.median(late)
            growth[name] = {
                "warm_mib": first,
                "end_mib": last,
                "growth_mib": round(last - first, 1),
            }
    return growth


def _late_compiles(metrics: dict[str, float]) -> dict[str, int]:
    name = "ostinato_late_compiles_total "
    return {
        key.removeprefix(name): int(value)
        for key, value in metrics.items()
        if key.startswith(name) and value
    }


def _engine_figures(metrics: dict[str, float]) -> dict[str, float]:
    counters = ("preemptions", "prefix_cache_hits", "prompt_tokens", "generation_tokens")
    short = {
        name.removeprefix("ostinato_").removesuffix("_total"): value
        for name, value in metrics.items()
        if name.startswith("ostinato_")
    }
    return {
        name: value
        for name, value in short.items()
        if name.startswith(("steps", "completions_total")) or name in counters
    }


def run_soak(
    seconds: float,
    *,
    seed: int,
    num_clients: int,
    overrides: Sequence[str] = (),
    faults: Faults = Faults(),  # noqa: B008 - it is immutable
) -> dict[str, Any]:
    """One soak test.

    Args:
        seconds: duration of the traffic.
        seed: seed of all requests. Their order at the server depends on timing.
        num_clients: clients, each of which sends one request after the other.
        overrides: overrides of the server's configuration.
        faults: the faults to inject.

    Returns:
        A record with `checks` (name → whether it holds), the figures behind them and the
        conditions.

    Raises:
        RuntimeError: the server did not start.
    """
    server = SoakServer([*_OVERRIDES, *overrides])
    try:
        url = server.wait_until_ready()
        fds_before = server.num_fds()
        raise_file_limit()
        driven = drive(url, seconds, seed, num_clients, server, faults)
        counts, memory = asyncio.run(driven)
        metrics = _quiet_metrics(url)
        fds = _quiet_fds(server, fds_before + _FDS_KEPT)
        code = server.stop()
    finally:
        server.kill()
    late, figures = _late_compiles(metrics), _engine_figures(metrics)
    errors = [
        line.rstrip()
        for line in server.lines
        if (" ERROR " in line or "Traceback" in line)
        and not (faults.kill_every_s and any(text in line for text in _SAID_OF_KILLS))
    ]
    growth = _growth(memory, seconds)
    latency = _latency(counts, seconds, faults.calm_s) if faults.calm_s else {}
    leaked = metrics["ostinato_kv_cache_usage_ratio"] * metrics["ostinato_kv_cache_blocks"]
    return {
        "checks": {
            "nothing compiled late": not late,
            "no block leaked": leaked == 0 and metrics["ostinato_requests_running"] == 0,
            "no 5xx": not any(status >= 500 for status in counts.statuses),
            "no file descriptor leaked": fds <= fds_before + _FDS_KEPT,
            "memory stands still": seconds < _GROWTH_FROM_S
            or all(sizes["growth_mib"] <= _GROWTH_MIB for sizes in growth.values()),
            "good answers in time": not latency
            or latency["storm"]["p99_s"] <= _MOST_SLOWER * latency["calm"]["p99_s"],
            "every answer as expected": not counts.wrong,
            # The engine checks its block accounting when it ends, and logs errors.
            "no error in the log, exit code 0": not errors and code == 0,
        },
        "late_compiles": late,
        "leaked_blocks": leaked,
        "statuses": {str(status): count for status, count in sorted(counts.statuses.items())},
        "exchanges": dict(counts.exchanges),
        "faults": dict(sorted(counts.faults.items())),
        "file_descriptors": {"before": fds_before, "after": fds},
        "wrong": counts.wrong[:20],
        "errors": errors[:20],
        "exit_code": code,
        "engine": figures,
        "requests_by_field": dict(sorted(counts.options.items())),
        "memory": growth,
        "latency": latency,
        "memory_mib": memory[:: max(1, len(memory) // 60)],
        "conditions": _conditions(seconds, seed, num_clients, overrides, faults),
    }


def _conditions(
    seconds: float, seed: int, num_clients: int, overrides: Sequence[str], faults: Faults
) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(Path(ostinato.__file__).parent),
        "seconds": seconds,
        "seed": seed,
        "clients": num_clients,
        "bad_clients": faults.num_bad_clients,
        "calm_s": faults.calm_s,
        "kill_every_s": faults.kill_every_s,
        "overrides": [*_OVERRIDES, *overrides],
        "cpu": cpu_name(),
        "gpus": gpu_names(),
        "versions": package_versions(),
    }


def _print(record: dict[str, Any]) -> None:
    console = Console(width=100, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check")
    table.add_column("holds")
    table.add_column("figures", overflow="fold")
    exchanges = ", ".join(f"{count} {what}" for what, count in record["exchanges"].items())
    growth = record["memory"]
    figures = (
        record["late_compiles"] or 0,
        f"{record['leaked_blocks']:g} in use at the end",
        ", ".join(f"{status}: {count}" for status, count in record["statuses"].items()),
        "{before} before, {after} after".format(**record["file_descriptors"]),
        ", ".join(f"{name} {sizes['growth_mib']:+.1f} MiB" for name, sizes in growth.items()),
        ", ".join(
            f"{name} p50 {one['p50_s']:.2f} p99 {one['p99_s']:.2f} s"
            for name, one in record["latency"].items()
        ),
        f"{exchanges}; {len(record['wrong'])} wrong",
        f"{len(record['errors'])} errors, exit code {record['exit_code']}",
    )
    for (name, holds), text in zip(record["checks"].items(), figures, strict=True):
        table.add_row(name, "yes" if holds else "NO", str(text))
    console.print(table)
    engine = record["engine"]
    console.print(", ".join(f"{name} {value:g}" for name, value in engine.items()), markup=False)
    for line in (*record["wrong"], *record["errors"]):
        console.print(f"- {line}", markup=False)


def main(arguments: list[str]) -> int:
    """Run the soak test and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long requests are sent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--bad-clients", type=int, default=0, help="connections that misbehave")
    parser.add_argument(
        "--calm-minutes", type=float, default=0, help="before the bad ones come; 0 = from the start"
    )
    parser.add_argument("--kill-every", type=float, default=0, help="seconds; 0 = no engine dies")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("overrides", nargs="*", help="configuration of the server")
    options = parser.parse_args(arguments)
    record = run_soak(
        60 * options.minutes,
        seed=options.seed,
        num_clients=options.clients,
        overrides=options.overrides,
        faults=Faults(options.bad_clients, 60 * options.calm_minutes, options.kill_every),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _print(record)
    return 0 if all(record["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
