"""Compares engines that free the KV blocks outside of sliding windows with engines that keep them.

    python -m ostinato.benchmarks.micro.engine.window_cache
    python -m ostinato.benchmarks.micro.engine.window_cache --memory-gib 0.05 --json FILE

Both engines have the same random model and the same memory for the KV cache. The model has the
windows and the proportions of Gemma 3 1B in a smaller size, so that prompts are computed in seconds
on a CPU. In each round both engines answer the same long prompts, which differ from round to round,
one engine after the other in a changing order. Prompts without room wait, or their sequences are
preempted and computed again.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
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
from ostinato.runtime.llm import LLM
from ostinato.runtime.types.params import SamplingParams

__all__ = ("measure",)

_NAMES = {"freed": "cache.keep_all_tokens=false", "kept": "cache.keep_all_tokens=true"}
_VOCAB_SIZE = 4096
_MODEL: dict[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def _engine(setting: str, memory_gib: float, max_num_seqs: int, max_model_len: int) -> LLM:
    overrides = [
        setting,
        "model.load_format=dummy",
        f"model.max_model_len={max_model_len}",
        f"cache.memory_gib={memory_gib}",
        f"scheduler.max_num_seqs={max_num_seqs}",
        "scheduler.max_num_batched_tokens=512",
        "speculation.method=none",
    ]
    return LLM(config=load_config(overrides, values={"model.config": _MODEL}))


def measure(
    *, memory_gib: float, requests: int, prompt_tokens: int, output_tokens: int, rounds: int
) -> dict[str, Any]:
    """Answers of both engines to the same requests.

    Args:
        memory_gib: of the KV cache of each engine.
        requests: how many are there from the start, in each round.
        prompt_tokens: of the longest prompt; the shortest has half of them.
        output_tokens: of each answer.
        rounds: how often each engine is measured.

    Returns:
        For each engine its blocks, output tokens per second and preempted sequences of each round,
        and the ratio of the speeds.
    """
    length = prompt_tokens + output_tokens
    engines = {
        name: _engine(setting, memory_gib, requests, length) for name, setting in _NAMES.items()
    }
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    found: dict[str, dict[str, list[float]]] = {
        name: {"tokens_per_s": [], "preemptions": []} for name in engines
    }
    meter = LoadMeter().start()
    for number in range(rounds):
        numbers = random.Random(number)
        prompts = [
            [
                numbers.randrange(2, _VOCAB_SIZE)
                for _ in range(numbers.randint(prompt_tokens // 2, prompt_tokens))
            ]
            for _ in range(requests)
        ]
        order = list(engines) if number % 2 else list(engines)[::-1]
        for name in order:
            llm = engines[name]
            before, begin = llm.stats().num_preemptions, time.perf_counter()
            llm.generate(prompts, sampling, use_progress=False)
            seconds = time.perf_counter() - begin
            found[name]["tokens_per_s"].append(requests * output_tokens / seconds)
            found[name]["preemptions"].append(llm.stats().num_preemptions - before)
            print(f"round {number + 1}, {name}: {seconds:.1f} s", file=sys.stderr)
    others = meter.stop()
    speeds = [found[name]["tokens_per_s"] for name in ("freed", "kept")]
    ratio, interval = bootstrap_ratio(*speeds)
    return {
        "engines": {
            name: {"num_blocks": llm.stats().num_blocks, **found[name]}
            for name, llm in engines.items()
        },
        "ratio": ratio,
        "interval": list(interval),
        "other_programs": round(others, 3),
    }


def main(arguments: Sequence[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--memory-gib", type=float, default=0.06, help="of the KV cache")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="of the longest prompt")
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args(arguments)
    workload = {
        "memory_gib": options.memory_gib,
        "requests": options.requests,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "rounds": options.rounds,
    }
    results = measure(**workload)
    conditions = {
        **basic_conditions(),
        "command": shlex.join(
            ["python", "-m", "ostinato.benchmarks.micro.engine.window_cache", *arguments]
        ),
        "threads": torch.get_num_threads(),
        "model": _MODEL,
        **workload,
    }
    if options.json is not None:
        write_json({"conditions": conditions, "results": results}, options.json)
    _print(conditions, results)


def _print(conditions: dict[str, Any], results: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("blocks outside of windows")
    for heading in ("tokens/s", "range", "preempted"):
        table.add_column(heading, justify="right")
    for name, engine in results["engines"].items():
        rates = engine["tokens_per_s"]
        table.add_row(
            name,
            f"{statistics.median(rates):.0f}",
            f"{min(rates):.0f} to {max(rates):.0f}",
            f"{sum(engine['preemptions']):.0f}",
        )
    console = Console(width=100, highlight=False)
    console.print(json.dumps(conditions, indent=1), markup=False)
    console.print(table)
    low, high = results["interval"]
    console.print(
        f"freed / kept: {results['ratio']:.2f} (95 %: {low:.2f} to {high:.2f}); other programs "
        f"took {100 * results['other_programs']:.0f} % of the processor"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
