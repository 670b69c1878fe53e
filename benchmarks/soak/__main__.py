"""Hours in minutes: a real `run serve` under traffic of every kind, and what must hold afterwards.

    python -m ostinato.benchmarks.soak
    python -m ostinato.benchmarks.soak --clients 250 --bad-clients 250 --calm-minutes 2 --minutes 10
    python -m ostinato.benchmarks.soak --kill-every 20 server.max_restarts=1000
    python -m ostinato.benchmarks.soak --minutes 60 --seed 1 --json FILE device.threads=1

Clients send prompts of random lengths with random options, several completions and prompts at once,
bad requests, and go away in the middle of answers. In the end: nothing compiled after the start,
every block is free and block accounting is whole, no 5xx, no error in the log, memory and file
descriptors stand still; with `--calm-minutes`, good clients' p99 stays within twice of what it is
before the bad ones come. The KV cache is so small that sequences wait and are preempted, and all of
it is in use soon (another model than the demo needs its own `cache.memory_gib`). Needs `httpx`, of
the extra `test`. Exit code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

import ostinato
from ostinato.benchmarks.machine.probes import commit_of
from ostinato.benchmarks.soak.faults import kill_engines, misbehave
from ostinato.benchmarks.soak.traffic import TEXT, Exchange, Traffic
from ostinato.runtime.startup.machine_info import cpu_name, gpu_names, package_versions

__all__ = ("Faults", "run_soak")

_OVERRIDES = ("server.port=0", "cache.memory_gib=0.004")
_START_S = 600.0
_QUIET_S = 60.0
_STOP_S = 60.0
_REPLY_S = 120.0
_SAMPLE_S = 1.0
_FDS_KEPT = 16  # more than before the traffic: pipes of the processes that check grammars
_WARM_SHARE = 0.3  # of the time, before memory is expected to stand still
_GROWTH_MIB = 32.0  # that a process may grow by after that: the allocator's, not a request's
_GROWTH_FROM_S = 120.0  # shorter runs have no time to stand still
# What the log says, as an error, of an engine that was killed on purpose.
_SAID_OF_KILLS = ("the engine died: its process was killed", "flight recorder: the last")
_MOST_SLOWER = 2.0  # p99 of good requests among bad clients, against good ones alone


class _Server:
    """`run serve` in a process of its own, with the lines that it and its engine write."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.process = psutil.Popen(
            [sys.executable, "-m", "ostinato", "serve", *_OVERRIDES, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> str:
        """Its URL.

        Raises:
            RuntimeError: it ended, or took too long.
        """

        def ended() -> bool:
            return not self._reader.is_alive() or any("ready after" in line for line in self.lines)

        with self._news:
            self._news.wait_for(ended, _START_S)
        if not any("ready after" in line for line in self.lines):
            self.process.kill()
            raise RuntimeError(f"the server did not start:\n{''.join(self.lines)}")
        return next(line for line in self.lines if "answers 503 until" in line).split()[2]

    def num_fds(self) -> int:
        """Open files and sockets of the API process."""
        return self.process.num_fds()

    def rss_mib(self) -> dict[str, float]:
        """Memory of the API process and of the engine process."""
        sizes = {"api": self.process.memory_info().rss}
        for child in self.process.children():
            if "ostinato.runtime.process.engine_main" in child.cmdline():
                sizes["engine"] = child.memory_info().rss
        return {name: round(size / 2**20, 1) for name, size in sizes.items()}

    def stop(self) -> int:
        """Ask it to end; its exit code, -9 when it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(_STOP_S)
        except psutil.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(_STOP_S)
        return code

    def kill(self) -> None:
        """End it however it is; nothing when it has ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None, "stdout=PIPE"
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


@dataclass(slots=True)
class _Counts:
    """What the clients saw."""

    exchanges: Counter[str] = field(default_factory=Counter)  # answered, refused, hung up
    statuses: Counter[int] = field(default_factory=Counter)
    options: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # of soak_faults
    wrong: list[str] = field(default_factory=list)  # answers that are not what was to come
    answered: list[tuple[float, float]] = field(default_factory=list)  # when sent, seconds it took

    def blame(self, exchange: Exchange, what: str) -> None:
        self.wrong.append(f"{exchange.path} {what[:500]}: {json.dumps(exchange.body)[:2000]}")


async def _exchange(client: httpx.AsyncClient, exchange: Exchange, counts: _Counts) -> None:
    counts.options.update(exchange.body.keys())
    sent = time.monotonic()
    is_whole = False
    try:
        async with asyncio.timeout(exchange.patience_s):
            async with client.stream("POST", exchange.path, json=exchange.body) as response:
                counts.statuses[response.status_code] += 1
                if response.status_code != exchange.status:
                    await response.aread()
                    counts.blame(exchange, f"gave {response.status_code}: {response.text}")
                elif response.status_code != 200:
                    await response.aread()
                    counts.exchanges["refused"] += 1
                elif exchange.body["stream"]:
                    is_whole = await _read_stream(response, exchange, counts)
                else:
                    await response.aread()
                    is_whole = True
                    _check_choices(response.json()["choices"], exchange, counts)
    except TimeoutError:
        counts.exchanges["hung up"] += 1
    except httpx.HTTPError as error:
        counts.blame(exchange, f"broke: {type(error).__name__}: {error}")
    if is_whole:
        counts.answered.append((sent, time.monotonic() - sent))


async def _read_stream(response: httpx.Response, exchange: Exchange, counts: _Counts) -> bool:
    """Whether the client read to the end."""
    last, chunks, ended = "", 0, set()
    if exchange.chunks_read == 0:
        counts.exchanges["hung up"] += 1
        return False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        last, chunks = line, chunks + 1
        if line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk.get("choices", ()):
                if choice["finish_reason"] is not None:
                    ended.add((choice["index"], choice["finish_reason"]))
        if chunks == exchange.chunks_read:
            counts.exchanges["hung up"] += 1
            return False
    _check_ends([reason for _, reason in ended], exchange, counts)
    if last != "data: [DONE]":
        counts.blame(exchange, f"the stream ended with {last}")
    return True


def _check_choices(choices: list[dict[str, Any]], exchange: Exchange, counts: _Counts) -> None:
    _check_ends([choice["finish_reason"] for choice in choices], exchange, counts)


def _check_ends(reasons: list[str], exchange: Exchange, counts: _Counts) -> None:
    counts.exchanges["answered"] += 1
    if len(reasons) != exchange.num_choices or not set(reasons) <= {"stop", "length", "repetition"}:
        counts.blame(exchange, f"{exchange.num_choices} choices ended as {reasons}")


class Faults(NamedTuple):
    """What goes wrong besides the clients' own requests."""

    num_bad_clients: int = 0  # connections of soak_faults.misbehave
    calm_s: float = 0.0  # before these come: good clients alone, to compare with
    kill_every_s: float = 0.0  # an engine, again and again; 0 = never


async def _drive(
    url: str, seconds: float, seed: int, num_clients: int, server: _Server, faults: Faults
) -> tuple[_Counts, list[dict[str, float]]]:
    """Send traffic for that long, then wait until all clients have their last answers.

    Returns:
        What they saw, and the server's memory once a second: `at` seconds, MiB by process.
    """
    counts, memory = _Counts(), []
    begin = time.monotonic()
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=_REPLY_S, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]
        token_ids = (await client.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]

        async def send(number: int) -> None:
            traffic = Traffic(seed, number, token_ids, model["max_model_len"])
            while time.monotonic() - begin < seconds:
                await _exchange(client, traffic.next(), counts)

        async def sample() -> None:
            while True:
                memory.append({"at": round(time.monotonic() - begin, 1), **server.rss_mib()})
                await asyncio.sleep(_SAMPLE_S)

        others = [asyncio.create_task(sample())]
        if faults.kill_every_s:
            killing = kill_engines(server.process, faults.kill_every_s, counts.faults)
            others.append(asyncio.create_task(killing))

        async def send_bad(number: int) -> None:
            await asyncio.sleep(faults.calm_s)
            await misbehave(
                url,
                token_ids,
                seed=f"{seed}/bad/{number}",
                until=begin + seconds,
                counts=counts.faults,
            )

        bad = (send_bad(number) for number in range(faults.num_bad_clients))
        await asyncio.gather(*(send(number) for number in range(num_clients)), *bad)
        for task in others:
            task.cancel()
    counts.answered = [(sent - begin, took) for sent, took in counts.answered]
    return counts, memory


def _latency(counts: _Counts, seconds: float, calm_s: float) -> dict[str, dict[str, float]]:
    """Seconds to whole answers of good clients, alone and among bad ones; {} = nothing to compare.

    The first and last tenth of the calm time do not count: clients begin all at once, and what is
    sent late meets the bad ones.
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
    """`/metrics` by name and labels, as soon as nothing runs; whatever there is after a minute."""
    deadline = time.monotonic() + _QUIET_S
    while True:
        text = httpx.get(f"{url}/metrics", timeout=_REPLY_S).text
        found = {
            "".join((sample.name, *(f" {k}={v}" for k, v in sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        unfinished = found["ostinato_requests_running"] + found["ostinato_requests_waiting"]
        if unfinished == 0 or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _quiet_fds(server: _Server, enough: int) -> int:
    """Descriptors once connections had time to be closed: as soon as there are so few."""
    deadline = time.monotonic() + _QUIET_S
    while (count := server.num_fds()) > enough and time.monotonic() < deadline:
        time.sleep(0.2)
    return count


def _growth(memory: list[dict[str, float]], seconds: float) -> dict[str, dict[str, float]]:
    """MiB after the warm-up and at the end, medians of a tenth of the time each."""
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
        seconds: how long requests are sent.
        seed: of all requests. Their order at the server depends on timing.
        num_clients: clients that send one request after the other.
        overrides: configuration of the server.
        faults: what goes wrong on purpose.

    Returns:
        A record with `checks` (name → whether it holds), the figures behind them and the
        conditions.

    Raises:
        RuntimeError: the server did not start.
    """
    server = _Server(overrides)
    try:
        url = server.wait_until_ready()
        fds_before = server.num_fds()
        driven = _drive(url, seconds, seed, num_clients, server, faults)
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
            # The engine checks its block accounting when it ends, and logs what is broken.
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
    """Run, print the table; the exit code."""
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
