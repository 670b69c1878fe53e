"""Measures the sum over tensor-parallel ranks on CPUs: `ostinato::all_reduce` between processes.

    python -m ostinato.benchmarks.parallel.all_reduce
    python -m ostinato.benchmarks.parallel.all_reduce --ranks 2 --rows 1,32,512 --json FILE

Each rank is a process with one thread; the machine should have a core for each and no other work.
The values are float32, as the partial sums of layers on CPUs are. There are two figures for each
shape:

one      microseconds of one sum, called from Python as a captured graph of one call. It includes
         the call, and the time that this rank waits until the others make the same call.
in step  microseconds of a sum in a captured graph of 16, as many as a decode step of llama-45m has

Other programs delay a rank, and all ranks wait for it. So each measurement is cut into 20 windows.
The figures of the window with the least p99 are reported as `quiet`, beside the figures of all
windows together.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.ops.native.cpu_graph import CpuGraph
from ostinato.ops.native.library import load
from ostinato.ops.parallel.collectives import all_reduce
from ostinato.ops.parallel.group import ParallelGroup
from ostinato.ops.parallel.segment import create_segment

__all__ = ("percentile", "time_sums")

_MODULE = "ostinato.benchmarks.parallel.all_reduce"
_IN_STEP = 16
_WINDOWS = 20


def percentile(values: list[float], percent: float) -> float:
    """The smallest value such that at least `percent` % of the values do not exceed it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def time_sums(
    group: ParallelGroup, shape: tuple[int, int], *, sums: int, rounds: int
) -> list[float]:
    """Microseconds of a sum over the ranks; every rank of the group must call this.

    Args:
        group: with this process's rank.
        shape: [T, D] of the values, float32.
        sums: sums in one captured graph; the time of the graph is divided by this number.
        rounds: replays that are timed. A tenth of this number run first as a warm-up.

    Returns:
        One number for each replay.
    """
    graph, handle = CpuGraph(), torch.tensor([group.handle])
    value = graph.input(torch.float32, shape)
    slot, result = graph.constant(handle), value
    for _ in range(sums):
        graph.begin_layer()
        arguments = [value, None, slot, "float32"]
        (result,) = graph.call(torch.ops.ostinato.all_reduce.default, arguments)
    graph.set_result(result)
    x, out = torch.ones(shape), torch.empty(shape)
    all_reduce(x, None, handle, torch.float32)  # returns when all ranks have started
    addresses = (ctypes.c_void_p * 1)(x.data_ptr())
    found: list[float] = []
    for _ in range(rounds + rounds // 10):
        begin = time.perf_counter()
        graph.replay(shape[0], 0, 0, addresses, out)
        found.append(1e6 * (time.perf_counter() - begin) / sums)
    return found[-rounds:]


def _windows(times: list[float]) -> list[list[float]]:
    size = max(1, len(times) // _WINDOWS)
    return [times[first : first + size] for first in range(0, size * _WINDOWS, size)]


def _measure(group: ParallelGroup, rows: list[int], width: int) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    for num_rows in rows:
        rounds = max(20 * _WINDOWS, 500 * _WINDOWS // num_rows)
        figures: dict[str, float] = {"rows": num_rows, "width": width}
        for name, sums in (("one", 1), ("in step", _IN_STEP)):
            times = time_sums(group, (num_rows, width), sums=sums, rounds=rounds)
            for percent in (50, 99):
                figures[f"{name} p{percent}"] = round(percentile(times, percent), 2)
            quiet = min(_windows(times), key=lambda window: percentile(window, 99))
            for percent in (50, 99):
                figures[f"{name} quiet p{percent}"] = round(percentile(quiet, percent), 2)
        found.append(figures)
    return found


def _start_others(arguments: argparse.Namespace, segment: int) -> list[subprocess.Popen[bytes]]:
    shape = ["--rows", ",".join(map(str, arguments.rows)), "--width", str(arguments.width)]
    command = [sys.executable, "-m", _MODULE, "--ranks", str(arguments.ranks), *shape]
    return [
        subprocess.Popen([*command, "--join", f"{segment}:{rank}"], pass_fds=(segment,))
        for rank in range(1, arguments.ranks)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_MODULE, description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rows", type=lambda text: [int(each) for each in text.split(",")], default=[1, 32, 512]
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--join", default="", help=argparse.SUPPRESS)  # descriptor:rank
    return parser


def main() -> int:
    """Measure on every rank, and print or write the figures of rank 0; returns the exit code."""
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    load("core")
    if arguments.join:
        segment, rank = map(int, arguments.join.split(":"))
        group = ParallelGroup(segment, rank, arguments.ranks)
        _measure(group, arguments.rows, arguments.width)
        return 0
    segment = create_segment(arguments.ranks)
    others = _start_others(arguments, segment)
    group = ParallelGroup(segment, 0, arguments.ranks)
    meter = LoadMeter()
    figures = _measure(group, arguments.rows, arguments.width)
    codes = [other.wait() for other in others]
    conditions = {
        **basic_conditions(),
        "cores": os.cpu_count(),
        "ranks": arguments.ranks,
        "load_average": os.getloadavg()[0],
        "other_cpu": round(meter.stop(), 3),  # share of all cores, without the ranks
    }
    table = Table(title="microseconds of a sum", box=box.SIMPLE)
    for name in figures[0]:
        table.add_column(name, justify="right")
    for row in figures:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    console = Console()
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in list(conditions.items())[2:7]))
    if arguments.json:
        write_json({"conditions": conditions, "sums": figures}, arguments.json)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
