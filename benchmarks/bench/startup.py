"""`run bench startup`: measures the time that `run serve` takes to start, cold and warm.

    run bench startup bench.repeats=5
    run bench startup model=qwen3-0.6b model.load_format=dummy bench.repeats=5

It starts real server processes. A cold start has an empty cache directory, so it makes the model's
programs, and compiles the kernels unless a wheel brings them. A warm start uses the bundle of the
cold one. Both are measured until the first token of a request, in turns. In both, the files are
already in the operating system's file cache. The first import of torch after a boot takes longer.

`cpu` is the CPU time of all processes of the server until the first token, compilers included.
Other programs on the machine change it less than the wall times.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.load.server_process import Server
from ostinato.benchmarks.machine.probes import LoadMeter, cpu_seconds
from ostinato.benchmarks.report.record import Metric, Point, Record, conditions_of
from ostinato.conf.environment import with_own_caches
from ostinato.conf.root import RunConfig

__all__ = ("startup",)

_TIMEOUT_S = 600.0
_READY, _FIRST_TOKEN, _CPU = "ready", "first token", "cpu"


def startup(config: RunConfig, context: BenchContext) -> Record:
    """Start a server `bench.repeats` times cold and `bench.repeats` times warm.

    Raises:
        StartupError: a server did not start; the text has the end of its log.
    """
    count = config.bench.repeats
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="ostinato-startup-") as scratch:
        for number in range(count):
            cache = Path(scratch) / f"cache-{number}"
            for state, found in starts.items():
                context.show(f"{state} start {number + 1} of {count}")
                load = LoadMeter()
                found.append(_start_once(config, cache) | {"other_cpu": load.stop()})
    points = [
        Point(label=state, parameters={"state": state}, metrics=_metrics(found))
        for state, found in starts.items()
    ]
    notes = ["phases overlap: weights load and kernels compile during imports and tracing"]
    if sys.dont_write_bytecode:
        notes.append("Python keeps no bytecode (PYTHONDONTWRITEBYTECODE): modules may be compiled")
    return Record(
        kind=config.bench.kind.value, conditions=conditions_of(config), points=points, notes=notes
    )


def _metrics(starts: list[dict[str, float]]) -> dict[str, Metric]:
    names = dict.fromkeys(name for start in starts for name in start)
    last = (_READY, _FIRST_TOKEN, _CPU, "other_cpu")
    metrics: dict[str, Metric] = {}
    for name in sorted(names, key=lambda name: last.index(name) if name in last else -1):
        runs = [start[name] for start in starts if name in start]
        unit, better = ("share", "") if name == "other_cpu" else ("s", "lower")
        metrics[name] = Metric.of(runs, unit, better)
    return metrics


def _start_once(config: RunConfig, cache: Path) -> dict[str, float]:
    """Seconds of each phase of one start, and `ready`, `first token` and `cpu`."""
    graphs = dataclasses.replace(config.graphs, bundle_dir="")
    config = dataclasses.replace(config, graphs=graphs)
    begin = time.monotonic()
    with Server(config, environment=with_own_caches(cache)) as server:
        ready = time.monotonic() - begin
        _request_token(server.url)
        first_token = time.monotonic() - begin
        cpu = cpu_seconds(psutil.Process(server.pid))
        ended = {_READY: ready, _FIRST_TOKEN: first_token, _CPU: cpu}
        return {**server.startup_phases(), **ended}


def _request_token(url: str) -> None:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
        reply.read()
