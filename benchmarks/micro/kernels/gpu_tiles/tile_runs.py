"""What the programs of this folder share: their options, compiling, timing and the record.

A launch is timed in a CUDA graph, as a captured decode step launches it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from ostinato.benchmarks.machine.roofline import Machine
from ostinato.benchmarks.report.json_file import write_json
from ostinato.runtime.machine_info import gpu_names, package_versions

__all__ = ("finish", "graph_us", "make_parser", "usable_jobs")

Job = TypeVar("Job")

_REPEATS = 7


def graph_us(call: Callable[[int], object], launches: int) -> float:
    """Median microseconds of a call. A CUDA graph makes `launches` calls in succession.

    Args:
        call: launches the kernel once; takes the index of the call.
        launches: calls in the graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            call(index)
    graph.replay()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / launches)
    return statistics.median(times)


def make_parser(program: str) -> argparse.ArgumentParser:
    """The options that the programs share."""
    parser = argparse.ArgumentParser(prog=f"gpu_tiles.{program}")
    parser.add_argument("--models", default="llama-8b,qwen3-0.6b", help="separated by commas")
    parser.add_argument("--output", type=Path, help="a JSON file for all figures")
    parser.add_argument("--processes", type=int, default=8, help="how many compile at once")
    return parser


def usable_jobs(jobs: list[Job], compiles: Callable[[Job], bool], processes: int) -> list[Job]:
    """The jobs whose kernel compiles. Their kernels are then in Triton's cache.

    Args:
        jobs: what to compile.
        compiles: compiles one job; False = its tile does not fit the device.
        processes: how many processes compile at the same time.
    """
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        works = list(pool.map(compiles, jobs, chunksize=2))
    return [job for job, compiled in zip(jobs, works, strict=True) if compiled]


def finish(machine: Machine, rows: list[dict[str, Any]], output: Path | None) -> None:
    """Print the rate of the memory, and write the figures with their conditions to `output`."""
    print(f"a copy moves {machine.copy_bytes_s / 1e12:.2f} TB/s")
    if output:
        record = {
            "gpus": gpu_names(),
            "versions": package_versions(),
            "machine": asdict(machine),
            "rows": rows,
        }
        write_json(record, output)
