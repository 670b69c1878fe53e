"""Compares the decode speed of dtypes of the KV cache at a long context, in turns in one process.

    python -m ostinato.benchmarks.micro.engine.decode_cache model=qwen3-0.6b model.load_format=dummy
    python -m ostinato.benchmarks.micro.engine.decode_cache model.path=DIR --sequences 1,4 --json F

There is an engine for each dtype. In each round they decode the same sequences, one engine after
the other, in a changing order. Prompts are computed once and then found in the prefix cache, so
that only decode steps are timed. Sequences share no blocks, and drafts are off.

The limit is the time in which the machine reads the weights and the keys and values of the contexts
once. Its read bandwidth is measured in every round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions, read_bandwidth
from ostinato.benchmarks.machine.roofline import sizes_of
from ostinato.benchmarks.micro.engine.scaling import measure_decode
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.statistics import bootstrap_ratio
from ostinato.conf.compose import load_config
from ostinato.models.layers.vocabulary_layers import Embedding
from ostinato.models.weight_methods.weight_method import MatrixRole
from ostinato.runtime.llm import LLM
from ostinato.runtime.startup.plan.model_source import ModelSource, model_skeleton, open_model

__all__ = ("measure",)

_BLOCK_SIZE = 16
_MORE_TOKENS = 64  # places for output tokens after the context


class _Engine(NamedTuple):
    llm: LLM
    weight_bytes: int  # that a decode step reads
    kv_bytes: int  # keys and values that a token at the end of the context reads


def _weight_bytes(source: ModelSource) -> int:
    """Bytes of all weights, except an embedding that is not also the output head."""
    return sum(
        parameter.nbytes
        for module in model_skeleton(source).modules()
        if not (isinstance(module, Embedding) and module.role is MatrixRole.embedding)
        for parameter in module.parameters(recurse=False)
    )


def _engine(overrides: Sequence[str], dtype: str, sequences: int, context: int) -> _Engine:
    own = [
        *overrides,
        f"cache.dtype={dtype}",
        f"cache.block_size={_BLOCK_SIZE}",
        "cache.keep_all_tokens=true",  # so that the size of the cache follows from the context
        f"model.max_model_len={context + _MORE_TOKENS}",
        f"scheduler.max_num_seqs={sequences}",
        "speculation.method=none",
    ]
    source = open_model(load_config(own))
    block = source.config.kv_cache_spec(_BLOCK_SIZE, source.cache_dtype).bytes_per_block
    blocks = sequences * (-(-(context + _MORE_TOKENS) // _BLOCK_SIZE) + 1) + 1
    own.append(f"cache.memory_gib={blocks * block / (1 << 30):.4f}")
    sizes = sizes_of(source.config, source.dtype, source.cache_dtype)
    kv_bytes, _ = sizes.attention_work(context - 1, context)
    return _Engine(LLM(config=load_config(own)), _weight_bytes(source), kv_bytes)


def measure(
    overrides: Sequence[str],
    dtypes: Sequence[str],
    sequences: Sequence[int],
    *,
    context: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Decode speeds of each number of sequences with each dtype of the cache.

    Args:
        overrides: settings of every engine.
        dtypes: values of `cache.dtype`; the others are compared with the first.
        sequences: how many decode at once.
        context: tokens of each.
        rounds: how often each engine is measured.
    """
    engines = {dtype: _engine(overrides, dtype, max(sequences), context) for dtype in dtypes}
    results = []
    for count in sequences:
        rates: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
        bandwidths: list[float] = []
        meter = LoadMeter().start()
        for number in range(rounds + 1):
            for turn in range(len(dtypes)):
                dtype = dtypes[(number + turn) % len(dtypes)]
                (seconds,) = measure_decode(engines[dtype].llm, count, context, 1)
                if number:  # the first round computes the prompts
                    rates[dtype].append(count / seconds)
            if number:
                bandwidths.append(read_bandwidth(torch.device("cpu")) * 1e9)
            else:
                meter.start()
        others = meter.stop()
        bandwidth = statistics.median(bandwidths)
        for dtype in dtypes:
            engine = engines[dtype]
            num_bytes = engine.weight_bytes + count * engine.kv_bytes
            ratio, interval = bootstrap_ratio(rates[dtype], rates[dtypes[0]])
            results.append(
                {
                    "sequences": count,
                    "cache_dtype": dtype,
                    "tokens_per_s": rates[dtype],
                    "weight_bytes": engine.weight_bytes,
                    "cache_bytes": count * engine.kv_bytes,
                    "limit_tokens_per_s": count * bandwidth / num_bytes,
                    "ratio": ratio,
                    "interval": list(interval),
                    "read_bytes_per_s": bandwidths,
                    "other_programs": round(others, 3),
                }
            )
        print(f"{count} sequences", file=sys.stderr)
    return results


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="settings, such as model=qwen3-0.6b")
    parser.add_argument("--dtypes", default="auto,int8", help="values of cache.dtype")
    parser.add_argument("--sequences", default="1", help="comma-separated")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args(arguments)
    results = measure(
        options.overrides,
        options.dtypes.split(","),
        [int(each) for each in options.sequences.split(",")],
        context=options.context,
        rounds=options.rounds,
    )
    conditions = {
        **basic_conditions(),
        "command": shlex.join(
            ["python", "-m", "ostinato.benchmarks.micro.engine.decode_cache", *arguments]
        ),
        "threads": torch.get_num_threads(),
        "context": options.context,
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("sequences", "cache", "tokens/s", "limit", "ratio", "95 %", "others, %"):
        table.add_column(heading, justify="right")
    for result in results:
        low, high = result["interval"]
        table.add_row(
            str(result["sequences"]),
            result["cache_dtype"],
            f"{statistics.median(result['tokens_per_s']):.1f}",
            f"{result['limit_tokens_per_s']:.1f}",
            f"{result['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{100 * result['other_programs']:.0f}",
        )
    console = Console(width=100, highlight=False)
    console.print(json.dumps(conditions, indent=1), markup=False)
    console.print(table)
    if options.json is not None:
        write_json({"conditions": conditions, "results": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
