"""Measures decode throughput by batch size and context, and compares it with the roofline.

    python -m ostinato.benchmarks.micro.engine.scaling
    python -m ostinato.benchmarks.micro.engine.scaling \\
        --models llama-45m --contexts 128,1024 --json F

The model has dummy weights in bfloat16 and runs in this process. Prompts are computed once and then
found in the prefix cache, so that only decode steps are timed. The roofline is the larger of two
times: reading every weight and the keys and values of the contexts once at the machine's memory
bandwidth (of reads on a CPU, of a copy on CUDA), and all multiplications at its matrix rate. Both
rates are measured before and after each point.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.machine_rates import machine_of, measure_rates
from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.machine.roofline import ModelSizes
from ostinato.benchmarks.report.json_file import write_json
from ostinato.conf.compose import load_config
from ostinato.runtime.llm import LLM
from ostinato.runtime.machine_info import gpu_names
from ostinato.runtime.types.params import SamplingParams

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ("measure_decode",)

_FIXED_CONTEXT = 256  # context of the points with different batch sizes
_FIXED_BATCH = 1  # batch size of the points with different contexts
_STEPS = 24
_DTYPE = torch.bfloat16


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def measure_decode(llm: LLM, batch: int, context: int, repeats: int) -> list[float]:
    """Seconds of a decode step of `batch` sequences with `context` tokens each.

    The prompts are in the prefix cache, except for their last block. Requests for one token are
    timed too, and their time is subtracted.
    """
    prompts = [
        [2 + (index * 7919 + i * 31) % 900 for i in range(context - _STEPS // 2)]
        for index in range(batch)
    ]
    llm.generate(prompts, _sampling(1), use_progress=False)
    found = []
    for _ in range(repeats):
        seconds = []
        for num_tokens in (1, 1 + _STEPS):
            begin = time.perf_counter()
            llm.generate(prompts, _sampling(num_tokens), use_progress=False)
            seconds.append(time.perf_counter() - begin)
        found.append((seconds[1] - seconds[0]) / _STEPS)
    return found


def _points(batches: list[int], contexts: list[int]) -> list[tuple[int, int]]:
    by_batch = [(batch, _FIXED_CONTEXT) for batch in batches]
    return list(dict.fromkeys([*by_batch, *((_FIXED_BATCH, context) for context in contexts)]))


def _measure_model(
    name: str, points: list[tuple[int, int]], repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    longest = max(context for _, context in points) + _STEPS
    most = max(batch for batch, _ in points)
    config = load_config(
        [
            f"model={name}",
            "model.load_format=dummy",
            "model.dtype=bfloat16",
            f"scheduler.max_num_seqs={most}",
        ],
        values={
            "model.max_model_len": longest,
            "model.config": {"max_position_embeddings": longest},
        },
    )
    sizes, _ = measure_rates(config, device)
    llm = LLM(config=config)
    results = []
    for batch, context in points:
        before = machine_of(device, _DTYPE)
        runs = measure_decode(llm, batch, context, repeats)
        after = machine_of(device, _DTYPE)
        results.append(
            {
                "model": name,
                "batch": batch,
                "context": context,
                "step_s": runs,
                "tokens_per_s": [batch / seconds for seconds in runs],
                "bandwidth_bytes_s": [before.copy_bytes_s, after.copy_bytes_s],
                "matmul_flop_s": [before.matmul_flop_s, after.matmul_flop_s],
                "roofline_tokens_per_s": [
                    batch / machine.least_seconds(*_work(sizes, batch, context))
                    for machine in (before, after)
                ],
            }
        )
        print(f"{name} {batch} x {context}", file=sys.stderr)
    del llm
    gc.collect()
    return results


def _work(sizes: ModelSizes, batch: int, context: int) -> tuple[int, int]:
    return sizes.decode_bytes(batch, context), sizes.decode_flop(batch, context)


def draw(results: list[dict[str, Any]], title: str, file: Path) -> None:
    """Plot measurements and roofline, one row per model: by batch size and by context."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(result["model"] for result in results))
    figure = Figure(figsize=(9.0, 3.2 * len(models)), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for row, model in enumerate(models):
        own = [result for result in results if result["model"] == model]
        for column, (axis, other, fixed) in enumerate(
            (("batch", "context", _FIXED_CONTEXT), ("context", "batch", _FIXED_BATCH))
        ):
            axes = figure.add_subplot(len(models), 2, 2 * row + column + 1)
            _draw_line(axes, [result for result in own if result[other] == fixed], axis)
            axes.set_title(f"{model}, {other} {fixed}", fontsize=10)
    figure.savefig(file, dpi=130)


def _draw_line(axes: Axes, results: list[dict[str, Any]], axis: str) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    results = sorted(results, key=lambda result: result[axis])
    places = [result[axis] for result in results]
    measured = [statistics.median(result["tokens_per_s"]) for result in results]
    low = [min(result["roofline_tokens_per_s"]) for result in results]
    high = [max(result["roofline_tokens_per_s"]) for result in results]
    axes.fill_between(places, low, high, color="#5f6b73", alpha=0.18, linewidth=0)
    axes.plot(places, high, color="#5f6b73", linewidth=1, label="roofline")
    axes.plot(places, measured, "o-", color="#2f6f9f", label="measured")
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="tokens per second")
    axes.set_xticks(places, [str(place) for place in places])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.grid(True, color="#e4e7ea", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="llama-45m,qwen3-0.6b", help="presets")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--contexts", default="128,512,2048,8192")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    parser.add_argument("--png", type=Path, help="draw the plots into this file")
    options = parser.parse_args(arguments)
    points = _points(
        *([int(n) for n in getattr(options, k).split(",")] for k in ("batches", "contexts"))
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = [
        result
        for name in options.models.split(",")
        for result in _measure_model(name, points, options.repeats, device)
    ]
    conditions = {
        **basic_conditions(),
        "gpus": gpu_names(),
        "threads": torch.get_num_threads(),
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "batch", "context", "tokens/s", "roofline", "share, %"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for result in results:
        measured = statistics.median(result["tokens_per_s"])
        roofline = statistics.mean(result["roofline_tokens_per_s"])
        table.add_row(
            result["model"],
            str(result["batch"]),
            str(result["context"]),
            f"{measured:.1f}",
            f"{roofline:.1f}",
            f"{100 * measured / roofline:.0f}",
        )
    title = f"{conditions['cpu']}, torch {conditions['versions'].get('torch')}, bfloat16"
    console = Console(width=100, highlight=False)
    console.print(title, markup=False)
    console.print(table)
    if options.json is not None:
        write_json({"conditions": conditions, "results": results}, options.json)
    if options.png is not None:
        draw(results, title, options.png)


if __name__ == "__main__":
    main(sys.argv[1:])
