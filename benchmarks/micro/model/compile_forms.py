"""Measures compile and step times of both compiled forms: a layer or the model as one program.

    python -m ostinato.benchmarks.micro.model.compile_forms 4 32
    python -m ostinato.benchmarks.micro.model.compile_forms \\
        4 32 --json F --overrides device.threads=2

The model is `model=llama-45m` with random weights and the given numbers of layers. Every compile
runs in a process with an empty Inductor cache. For each depth, another process times the steps. The
two forms take turns on the same weights and inputs, so that a change of the machine's state affects
both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch._inductor.utils import fresh_cache

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.conf.compose import load_config
from ostinato.conf.schema import GraphForm
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.capture import GraphRunner
from ostinato.graphs.compiler.compile import compile_model
from ostinato.models.base import LanguageModel
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.kv_cache import KVCache
from ostinato.models.registry import build_model
from ostinato.ops.attention import PlannedBackend, PlannedTable, load_backend, select_backend
from ostinato.ops.native.library import load
from ostinato.runtime.machine_info import gpu_names
from ostinato.runtime.startup.plan.device import set_threads
from ostinato.runtime.startup.plan.model_source import open_model

__all__ = ("Bench", "compile_once", "step_times")

_MODULE = "ostinato.benchmarks.micro.model.compile_forms"
_FORMS = tuple(form.value for form in GraphForm)
_NUM_WARMUP_STEPS = 5


class Bench:
    """A model with a given number of layers, and the inputs of its decode steps.

    Args:
        depth: decoder layers.
        overrides: overrides of the configuration.
        max_batch: sequences of the largest step.
        context: tokens of each sequence before a step.
    """

    def __init__(self, depth: int, overrides: list[str], *, max_batch: int, context: int) -> None:
        shape = ["model=llama-45m", f"model.config.num_hidden_layers={depth}"]
        config = load_config([*shape, *overrides])
        self.threads = set_threads(config.device)
        source = open_model(config)
        self.device, self.dtype, self._context = source.device, source.dtype, context
        block_size = config.cache.block_size
        self._spec = source.config.attention_spec(block_size, source.dtype, self.device)
        self.backend = select_backend(config.graphs.attention.value, self._spec)
        if self.device.type == "cpu":
            load("core")
        self.model: LanguageModel = build_model(
            source.config,
            dtype=source.dtype,
            device=self.device,
            attention_backend=self.backend,
            weights=source.weights,
        )
        init_dummy_weights(self.model, config.model.seed)
        self._blocks_per_seq = -(-(context + 1) // block_size)
        num_blocks = 1 + max_batch * self._blocks_per_seq
        spec = source.config.kv_cache_spec(block_size, source.dtype)
        self.kv_cache: KVCache = spec.allocate(num_blocks, self.device)
        self.buffers = StaticBuffers(
            max_num_tokens=max(16, max_batch),
            max_num_seqs=max(2, max_batch),
            max_blocks_per_seq=self._blocks_per_seq,
            block_size=block_size,
            device=self.device,
        )

    def compile(self, form: GraphForm) -> tuple[GraphRunner, float]:
        """The model's runner in this form, and the seconds of compiling and binding."""
        begin = time.perf_counter()
        example = self.buffers.batch(16, 2, 2)
        program = compile_model(self.model, form, example, self.kv_cache)(self.model)
        seconds = time.perf_counter() - begin
        planned, planner = load_backend(self.backend), None
        if isinstance(planned, PlannedBackend):
            planner = planned.make_planner(
                self._spec, [], tables=[PlannedTable(self._spec.block_size, self._blocks_per_seq)]
            )
        runner = GraphRunner(
            self.model, self.kv_cache, self.buffers, program=program, planner=planner
        )
        return runner, seconds

    def fill(self, batch: int) -> None:
        """Put a decode step of `batch` sequences into the host buffers."""
        self.buffers.wait_for_upload()
        host, context = self.buffers.host, self._context
        for index in range(batch):
            first = 1 + index * self._blocks_per_seq
            host.block_table[index] = range(first, first + self._blocks_per_seq)
            host.slot_mapping[index] = first * self.buffers.block_size + context
            host.token_ids[index] = 17 + index
        host.positions[:batch] = context
        host.seq_lens[:batch] = context + 1
        host.query_start_loc[: batch + 1] = range(batch + 1)
        host.logits_indices[:batch] = range(batch)

    def step(self, runner: GraphRunner, batch: int) -> float:
        """Run the step that `fill` made; returns seconds from the upload to tokens on the host."""
        begin = time.perf_counter()
        runner.run(batch, batch, batch, tokens_per_seq=1).argmax(-1).tolist()
        return time.perf_counter() - begin


def compile_once(depth: int, form: str, overrides: list[str]) -> dict[str, Any]:
    """Seconds of compiling and of the first step, in this process with an empty cache."""
    bench = Bench(depth, overrides, max_batch=2, context=32)
    bench.fill(1)
    with fresh_cache():
        runner, seconds = bench.compile(GraphForm(form))
        first_step = bench.step(runner, 1)
    return {"compile_s": seconds, "first_step_s": first_step}


def step_times(
    depth: int, batches: list[int], context: int, num_steps: int, overrides: list[str]
) -> dict[str, Any]:
    """Milliseconds of every timed decode step, {form: {batch: times}}, and the conditions."""
    bench = Bench(depth, overrides, max_batch=max(batches), context=context)
    times: dict[str, dict[str, list[float]]] = {form: {} for form in _FORMS}
    with fresh_cache():
        runners = {form: bench.compile(GraphForm(form))[0] for form in _FORMS}
        for batch in batches:
            bench.fill(batch)
            for number in range(_NUM_WARMUP_STEPS + num_steps):
                for form, runner in runners.items():
                    seconds = bench.step(runner, batch)
                    if number >= _NUM_WARMUP_STEPS:
                        times[form].setdefault(str(batch), []).append(seconds * 1000)
    return {
        "times_ms": times,
        "threads": bench.threads,
        "attention": bench.backend,
        "device": str(bench.device),
        "dtype": str(bench.dtype).removeprefix("torch."),
    }


def _in_process(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of a function of this module, run in a process of its own."""
    command = [sys.executable, "-m", _MODULE, "--job", json.dumps([name, arguments])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}({arguments}) failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    meter = LoadMeter()
    compiles: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for repetition in range(options.repeats):
        for depth in options.depths:
            for form in _FORMS:
                arguments = {"depth": depth, "form": form, "overrides": options.overrides}
                figures = _in_process("compile_once", arguments)
                compiles.append({"depth": depth, "form": form, "run": repetition, **figures})
    for depth in options.depths:
        arguments = {
            "depth": depth,
            "batches": options.batches,
            "context": options.context,
            "num_steps": options.steps,
            "overrides": options.overrides,
        }
        steps.append({"depth": depth, **_in_process("step_times", arguments)})
    return {
        "conditions": {
            **basic_conditions(),
            "model": "llama-45m",
            "overrides": options.overrides,
            "context": options.context,
            **{key: steps[0][key] for key in ("device", "dtype", "attention", "threads")},
            "gpus": gpu_names(),
            "other_cpu": meter.stop(),
        },
        "compiles": compiles,
        "steps": steps,
    }


def _table(record: dict[str, Any], batches: list[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ["layers", "form", "compile s", "first step s"]
    headings += [f"batch {batch}: ms, median (min)" for batch in batches]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "form" else "right", no_wrap=True)
    for entry in record["steps"]:
        for form in _FORMS:
            runs = [
                run
                for run in record["compiles"]
                if (run["depth"], run["form"]) == (entry["depth"], form)
            ]
            cells = [str(entry["depth"]), form]
            cells += [
                f"{min(run[key] for run in runs):.1f}" for key in ("compile_s", "first_step_s")
            ]
            for batch in batches:
                times = entry["times_ms"][form][str(batch)]
                cells.append(f"{statistics.median(times):.2f} ({min(times):.2f})")
            table.add_row(*cells)
    return table


def _report(record: dict[str, Any], batches: list[int]) -> None:
    conditions = record["conditions"]
    console = Console(width=110, highlight=False)
    console.print(
        f"{conditions['model']} {conditions['dtype']}, attention {conditions['attention']}, "
        f"context {conditions['context']}, on "
        f"{', '.join(conditions['gpus']) or conditions['cpu']}, "
        f"{conditions['threads']} threads, torch {torch.__version__}, other programs used "
        f"{conditions['other_cpu']:.0%} of the cores",
        markup=False,
    )
    console.print(_table(record, batches))


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("depths", type=int, nargs="*", help="numbers of layers; default 4 32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="decode batch sizes")
    parser.add_argument("--context", type=int, default=256, help="tokens before the timed step")
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each form")
    parser.add_argument(
        "--repeats", type=int, default=1, help="compiles of each form and depth; the best is shown"
    )
    parser.add_argument("--overrides", nargs="+", default=[], help="further configuration")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job is not None:
        name, job = options.job
        run = {"compile_once": compile_once, "step_times": step_times}[name]
        with torch.inference_mode():
            print(json.dumps(run(**job)))
        return
    options.depths = options.depths or [4, 32]
    record = _measure(options)
    _report(record, options.batches)
    if options.json is not None:
        write_json(record, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
