"""`run bench startup`: how long `run serve` takes until it serves, cold and warm.

    run bench startup
    run bench startup model=qwen3-0.6b model.load_format=dummy bench.repeats=5

Real server processes. Cold has an empty cache directory: kernels are built, programs traced and
compiled. Warm finds the bundle of the cold start. Both end with the first token of a request. The
operating system's file cache is warm in both; the first import of torch after a boot takes longer.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

import ostinato
from ostinato.benchmarks.probes import LoadMeter, commit_of
from ostinato.benchmarks.report import summary
from ostinato.conf.environment import with_own_caches
from ostinato.conf.root import EngineConfig
from ostinato.runtime.errors import StartupError
from ostinato.runtime.machine import cpu_name, gpu_names, package_versions

__all__ = ("bench",)

_TIMEOUT_S = 600.0
_WIDTH = 100
_READY, _FIRST_TOKEN = "ready", "first token"


def bench(config: EngineConfig) -> int:
    """Start a server `bench.repeats` times cold and as often warm.

    Raises:
        StartupError: a server did not start; its log is on standard error.
    """
    section = config.bench
    output = Path(section.output or f"outputs/bench/startup-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ostinato-startup-") as scratch:
        overrides = _overrides()
        for number in range(section.repeats):
            cache = Path(scratch) / f"cache-{number}"
            for state in ("cold", "warm"):
                load = LoadMeter()
                phases = _start_once(overrides, cache)
                starts.append({"state": state, "phases_s": phases, "other_cpu": load.stop()})
                _show(f"{state} start {number + 1} of {section.repeats}: {phases[_READY]:.1f} s")
    record = {
        "conditions": {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv[1:],
            "commit": commit_of(Path(ostinato.__file__).parent),
            "model": config.model.name or config.model.path or "bundled demo model",
            "cpu": cpu_name(),
            "gpus": gpu_names(),
            "versions": package_versions(),
        },
        "starts": starts,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _print(record, output)
    return 0


def _overrides() -> list[str]:
    """The configuration as it was given on our command line, for a server on any free port."""
    given = [word for word in sys.argv[1:] if "=" in word and not word.startswith("bench.")]
    return [*given, "server.port=0", "graphs.bundle_dir="]


def _start_once(overrides: list[str], cache: Path) -> dict[str, float]:
    """Seconds of each phase of one start, `ready` and `first token` last."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "ostinato", "serve", *overrides],
        env=with_own_caches(cache),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = _wait_until_ready(process)
        ready = time.monotonic() - begin
        _request_token(url)
        first_token = time.monotonic() - begin
        phases = _phases(url)
        return {**phases, _READY: ready, _FIRST_TOKEN: first_token}
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    """The server's address, as soon as it says that it is ready."""
    assert process.stdout is not None, "stdout=PIPE"
    url = ""
    for line in _lines(process):
        if "http://" in line and not url:
            url = line[line.index("http://") :].split()[0]
        if line.startswith("ready after"):
            return url
    raise StartupError(
        f"run serve ended with code {process.wait()} before it was ready; its log is above"
    )


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None, "stdout=PIPE"
    deadline = time.monotonic() + _TIMEOUT_S
    for line in process.stdout:
        yield line
        if time.monotonic() > deadline:
            raise StartupError(f"run serve was not ready after {_TIMEOUT_S:g} s")


def _request_token(url: str) -> None:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
        reply.read()


def _phases(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT_S) as reply:
        text = reply.read().decode()
    return {
        sample.labels["phase"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "ostinato_startup_seconds" and sample.labels["phase"] != _READY
    }


def _print(record: dict[str, Any], output: Path) -> None:
    console = Console(width=_WIDTH, highlight=False)
    conditions, starts = record["conditions"], record["starts"]
    console.print(
        f"{conditions['model']} on {', '.join(conditions['gpus']) or conditions['cpu']}, torch "
        f"{conditions['versions'].get('torch')}, other programs used up to "
        f"{max(start['other_cpu'] for start in starts):.0%} of the cores",
        markup=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("phase")
    for state in ("cold", "warm"):
        table.add_column(f"{state}, s", justify="right")
    names = dict.fromkeys(name for start in starts for name in start["phases_s"])
    for name in sorted(names, key=lambda name: name in (_READY, _FIRST_TOKEN)):
        cells = []
        for state in ("cold", "warm"):
            values = [
                start["phases_s"][name]
                for start in starts
                if start["state"] == state and name in start["phases_s"]
            ]
            cells.append(summary(values) if values else "")
        table.add_row(name, *cells, style="bold" if name == _READY else "")
    console.print(table)
    medians = [
        statistics.median(s["phases_s"][_READY] for s in starts if s["state"] == state)
        for state in ("cold", "warm")
    ]
    console.print(
        "phases overlap: weights and kernels beside imports and tracing; "
        f"ready after {medians[0]:.1f} s cold, {medians[1]:.1f} s warm",
        markup=False,
    )
    console.print(f"every start: {output}", markup=False, soft_wrap=True)


def _show(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}\n")
        sys.stderr.flush()
