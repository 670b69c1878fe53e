"""Measures the share of a step outside the model: scheduling, batch building, reporting.

    python -m ostinato.benchmarks.micro.engine.host_gap
    python -m ostinato.benchmarks.micro.engine.host_gap \\
        --models llama-45m --batches 1,8,32 --json FILE

The model has dummy weights in bfloat16 and decodes batches in this process. The gap is the share of
a step that is not between its launch and the arrival of its tokens (`EngineStats.step_seconds` and
`model_seconds`). Prompts are short and outputs long, so that prefill steps hardly count.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.tables import median_and_range
from ostinato.conf.compose import load_config
from ostinato.runtime.llm import LLM
from ostinato.runtime.machine_info import gpu_names
from ostinato.runtime.types.params import SamplingParams

__all__ = ("measure_gap",)

_PROMPT_TOKENS = 16


def measure_gap(llm: LLM, batch: int, num_tokens: int) -> dict[str, float]:
    """One run of `batch` sequences, `num_tokens` tokens each, all decoding together.

    Returns:
        gap: share of the steps' time outside the model, 0 to 1; step_ms: milliseconds of a step;
        other_cpu: share of the cores that other programs used.
    """
    prompts = [
        [2 + (index * 31 + i) % 900 for i in range(_PROMPT_TOKENS)] for index in range(batch)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    load = LoadMeter()
    before = llm.stats()
    llm.generate(prompts, sampling, use_progress=False)
    after = llm.stats()
    steps = after.step_seconds - before.step_seconds
    model = after.model_seconds - before.model_seconds
    return {
        "gap": (steps - model) / steps,
        "step_ms": 1000 * steps / (after.num_steps - before.num_steps),
        "other_cpu": load.stop(),
    }


def _measure_model(name: str, batches: list[int], repeats: int) -> list[dict[str, Any]]:
    config = load_config([f"model={name}", "model.load_format=dummy", "model.dtype=bfloat16"])
    llm = LLM(config=config)
    results = []
    for batch in batches:
        num_tokens = max(32, 256 // batch)
        measure_gap(llm, batch, 8)
        runs = [measure_gap(llm, batch, num_tokens) for _ in range(repeats)]
        results.append({"model": name, "batch": batch, "runs": runs})
    del llm
    gc.collect()
    return results


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="llama-45m,qwen3-0.6b", help="presets")
    parser.add_argument("--batches", default="1,8,32", help="sequences that decode together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every run to this file")
    options = parser.parse_args(arguments)
    batches = [int(batch) for batch in options.batches.split(",")]
    results = [
        result
        for name in options.models.split(",")
        for result in _measure_model(name, batches, options.repeats)
    ]
    conditions = {
        **basic_conditions(),
        "gpus": gpu_names(),
        "threads": torch.get_num_threads(),
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "batch", "step, ms", "host gap, %", "others, %"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for result in results:
        runs = result["runs"]
        table.add_row(
            result["model"],
            str(result["batch"]),
            median_and_range([run["step_ms"] for run in runs]),
            median_and_range([100 * run["gap"] for run in runs]),
            f"{100 * max(run['other_cpu'] for run in runs):.0f}",
        )
    console = Console(width=100, highlight=False)
    console.print(f"{conditions['cpu']}, torch {conditions['versions'].get('torch')}", markup=False)
    console.print(table)
    if options.json is not None:
        write_json({"conditions": conditions, "results": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
