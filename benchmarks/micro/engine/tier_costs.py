"""Measures what copies of KV blocks on disk cost: prompts and decode steps with and without them.

    python -m ostinato.benchmarks.micro.engine.tier_costs model=qwen3-0.6b model.load_format=dummy

One engine copies every block of a prompt to a new directory (`cache.disk_dir`), and one copies
nothing. In each round both compute the same prompts, in a changing order. No prompt repeats, so
every block is written and none is read. The ratio divides the seconds with copies by those without.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.statistics import bootstrap_ratio
from ostinato.conf.compose import load_config
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

__all__ = ("measure",)

_NUM_PROMPTS, _PROMPT, _OUTPUT = 4, 512, 16
_FIGURES = {"prompts_s": "all first tokens, s", "decode_s": "the other tokens, s"}


def measure(overrides: Sequence[str], rounds: int) -> dict[str, Any]:
    """Seconds of the prompts and of the decode steps of a batch, with and without copies.

    Args:
        overrides: settings of both engines.
        rounds: how often both are measured.
    """
    own = [*overrides, "speculation.method=none", f"scheduler.max_num_seqs={_NUM_PROMPTS}"]
    own.append(f"model.max_model_len={_PROMPT + _OUTPUT}")
    numbers = random.Random(0)
    found: dict[str, dict[str, list[float]]] = {
        name: {figure: [] for figure in _FIGURES} for name in ("without", "with")
    }
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            "without": build_engine(load_config(own)),
            "with": build_engine(load_config([*own, f"cache.disk_dir={folder}"])),
        }
        meter = LoadMeter().start()
        for number in range(rounds + 1):
            prompts = [
                [numbers.randrange(engines["with"].model.vocab_size) for _ in range(_PROMPT)]
                for _ in range(_NUM_PROMPTS)
            ]
            for name in ("with", "without") if number % 2 else ("without", "with"):
                seconds = _run(engines[name], prompts)
                if number:  # the first round warms up
                    for figure, each in zip(_FIGURES, seconds, strict=True):
                        found[name][figure].append(each)
            print(f"round {number} of {rounds}", file=sys.stderr)
        others = meter.stop()
        stats = engines["with"].stats().tiers["disk"]
        for engine in engines.values():
            engine.close()
    result: dict[str, Any] = {**found, "other_programs": round(others, 3)}
    result["stored_blocks"], result["dropped_blocks"] = (
        stats.num_stored_blocks,
        stats.num_dropped_blocks,
    )
    for figure in _FIGURES:
        ratio, interval = bootstrap_ratio(found["with"][figure], found["without"][figure])
        result[f"{figure}_ratio"], result[f"{figure}_interval"] = ratio, list(interval)
    return result


def _run(engine: Engine, prompts: Sequence[list[int]]) -> tuple[float, float]:
    """Seconds until every prompt has its first token, and seconds of the rest."""
    sampling = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(
            Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)
        )
    waiting = {str(index) for index in range(len(prompts))}
    begin = time.perf_counter()
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    middle = time.perf_counter()
    while engine.has_work:
        engine.step()
    end = time.perf_counter()
    while engine.has_copies:  # the next engine is measured without them
        engine.step()
    return middle - begin, end - middle


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="settings, such as model=qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args(arguments)
    result = measure(options.overrides, options.rounds)
    command = ["python", "-m", "ostinato.benchmarks.micro.engine.tier_costs", *arguments]
    conditions = {
        **basic_conditions(),
        "command": shlex.join(command),
        "threads": torch.get_num_threads(),
        "batch": f"{_NUM_PROMPTS} prompts of {_PROMPT} tokens, {_OUTPUT} tokens of output each",
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("seconds (medians)", "without copies", "with copies", "ratio", "95 %"):
        table.add_column(heading, justify="left" if heading[:7] == "seconds" else "right")
    for figure, title in _FIGURES.items():
        low, high = result[f"{figure}_interval"]
        cells = [f"{statistics.median(result[name][figure]):.3f}" for name in ("without", "with")]
        ratio = f"{result[f'{figure}_ratio']:.3f}"
        table.add_row(title, *cells, ratio, f"{low:.3f} to {high:.3f}")
    console = Console(width=100, highlight=False)
    console.print(json.dumps(conditions, indent=1), markup=False)
    console.print(table)
    print(f"{result['stored_blocks']} blocks copied, {result['dropped_blocks']} dropped")
    if options.json is not None:
        write_json({"conditions": conditions, "result": result}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
