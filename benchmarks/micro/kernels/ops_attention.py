"""Measures the CPU attention kernel on each instruction set beside torch's own attention.

    python -m ostinato.benchmarks.micro.kernels.ops_attention --threads 1 --save
    python -m ostinato.benchmarks.micro.kernels.ops_attention \\
        --dtype bfloat16 --cases 1:8192,512:512

A case is `query rows:context` of one sequence: 1:8192 is a decode step, 512:512 a prompt. It can
go on with `:sequences:shared tokens`: 1:1120:16:1024 is a decode step of 16 sequences with 1,120
tokens each, of which the first 1,024 lie in the same blocks. It is measured beside the same step
without shared blocks. Heads are those of Qwen3-0.6B unless `--heads` says otherwise. Kernels take
turns. Each call reads another of several KV caches. Together they exceed the processor's caches, as
the layers of a model do.
torch's `scaled_dot_product_attention` reads keys and values that lie one after the other. Each of
our kernels also runs on a cache in int8 (`cache.dtype=int8`).

The tables have the median time of a call in microseconds, GB/s of the cache, and GFLOP/s beside the
measured rate of multiply-adds in registers. Causal attention counts only the half that is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ostinato.benchmarks.machine.probes import LoadMeter
from ostinato.benchmarks.machine.processor import RESULTS, fma_peak, processor_class
from ostinato.benchmarks.report.json_file import write_json
from ostinato.models.kv_cache import KVCacheSpec
from ostinato.ops.attention import AttentionMetadata
from ostinato.ops.native.instruction_sets import runnable_levels
from ostinato.ops.native.library import load
from ostinato.runtime.machine_info import cpu_name

__all__ = ("measure_case",)

_BLOCK_SIZE = 16
_MIN_CALLS, _MAX_CALLS = 3, 400
_CASES = "1:512,1:2048,1:8192,16:2048,512:512,2048:2048"
_FILE = "ops-attention.json"


class _Heads(NamedTuple):
    queries: int
    keys: int
    size: int  # of queries and keys
    value_size: int = 0  # 0 = size


class _Case(NamedTuple):
    rows: int  # of a sequence
    context: int  # tokens of a sequence
    sequences: int = 1
    shared: int = 0  # leading tokens whose blocks all sequences name

    @property
    def blocks(self) -> int:
        """Blocks of a sequence."""
        return -(-self.context // _BLOCK_SIZE)

    @property
    def pairs(self) -> int:
        """The number of pairs of a query row and a key that it attends to."""
        return self.sequences * (self.rows * self.context - self.rows * (self.rows - 1) // 2)


# caches of keys and of values: [blocks, Hkv, block size, elements of a token] each
_Sides = tuple[Tensor, ...]


def _caches(heads: _Heads, case: _Case, dtype: torch.dtype, cold_bytes: int) -> list[_Sides]:
    """Keys and values of one layer, in enough copies to fill `cold_bytes`."""
    blocks = case.sequences * case.blocks + 1
    spec = KVCacheSpec(
        num_layers=1,
        num_kv_heads=heads.keys,
        head_dim=heads.size,
        value_dim=heads.value_size,
        block_size=_BLOCK_SIZE,
        dtype=dtype,
    )
    shapes = [(blocks, heads.keys, _BLOCK_SIZE, size) for size in spec.place_sizes]
    if dtype is torch.int8:
        # Any four bytes are the float32 0.01, and so is the scale of each token. With tiny scales,
        # products would be subnormal, which slows the processor down.
        one = tuple(
            torch.full((math.prod(shape) // 4,), 0.01).view(torch.int8).view(shape)
            for shape in shapes
        )
    else:
        one = tuple(torch.randn(shape).to(dtype) for shape in shapes)
    copies = -(-cold_bytes // sum(side.nbytes for side in one)) - 1
    return [one, *(tuple(side.clone() for side in one) for _ in range(copies))]


def _num_read(sides: _Sides, case: _Case) -> int:
    """Bytes of the contexts' keys and values."""
    per_token = sum(side.nbytes // (len(side) * _BLOCK_SIZE) for side in sides)
    return per_token * case.context * case.sequences


def _metadata(case: _Case) -> AttentionMetadata:
    table = torch.randperm(case.sequences * case.blocks, dtype=torch.int32) + 1
    table = table.view(case.sequences, case.blocks)
    positions = torch.arange(case.context - case.rows, case.context)
    slots = table[:, positions // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
    shared = case.shared // _BLOCK_SIZE
    table[:, :shared] = table[0, :shared].clone()
    return AttentionMetadata(
        torch.arange(case.sequences + 1, dtype=torch.int32) * case.rows,
        torch.full((case.sequences,), case.context, dtype=torch.int32),
        table,
        slots.flatten(),
        torch.zeros(1, dtype=torch.int64),
    )


def measure_case(
    heads: _Heads, case: _Case, dtype: torch.dtype, levels: list[str], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Figures by kernel: median_us, gbytes_per_s of the cache, gflops."""
    caches = _caches(heads, case, dtype, options.cold_mib << 20)
    scale, rows = heads.size**-0.5, case.sequences * case.rows
    q = torch.randn(rows, heads.queries, heads.size).to(dtype)
    sizes = (heads.size, heads.value_size or heads.size)
    k, v = (torch.randn(rows, heads.keys, size).to(dtype) for size in sizes)
    dense = [
        [
            side[1:].reshape(case.sequences, heads.keys, -1, size)
            for side, size in zip(sides, sizes, strict=True)
        ]
        for sides in caches
    ]
    mask = torch.ones(case.rows, case.context, dtype=torch.bool)
    mask = mask.tril(case.context - case.rows) if case.rows > 1 else None

    def stock(copy: int) -> Tensor:
        keys, values = (side[:, :, : case.context] for side in dense[copy % len(dense)])
        queries = q.view(case.sequences, case.rows, heads.queries, heads.size).transpose(1, 2)
        return scaled_dot_product_attention(
            queries, keys, values, mask, scale=scale, enable_gqa=True
        )

    calls: dict[str, Callable[[int], Tensor]] = {"torch": stock}
    num_bytes = {"torch": _num_read(caches[0], case)}
    own = _metadata(case._replace(shared=0))
    kinds = {"": (caches, v, own)}
    if case.shared > 0:
        kinds[", shared blocks"] = (caches, v, _metadata(case))
    kinds[", int8 cache"] = (_caches(heads, case, torch.int8, options.cold_mib << 20), v, own)
    if sizes[0] > sizes[1]:
        padded = heads._replace(value_size=0)
        wide = torch.nn.functional.pad(v, (0, sizes[0] - sizes[1]))
        kinds[", padded values"] = (_caches(padded, case, dtype, options.cold_mib << 20), wide, own)
    for place, level in enumerate(levels, 1):
        op = getattr(torch.ops, f"ostinato_{level}").paged_attention.default
        for kind, (some, values, metadata) in kinds.items():
            num_bytes[name := level + kind] = _num_read(some[0], case)
            # Each kernel begins at another copy. Otherwise the second kernel of a turn would find
            # the data in the processor's caches.
            first = place * len(some) // (len(levels) + 1)
            calls[name] = partial(
                _call,
                op,
                (q, k, values),
                some,
                first,
                (*metadata, scale, 0, 0.0, None, None, "cpu"),
            )
    times = _in_turns(calls, options.seconds)
    flop = 2 * case.pairs * heads.queries * sum(sizes)
    return {
        name: {
            "median_us": median * 1e6,
            "gbytes_per_s": num_bytes[name] / median / 1e9,
            "gflops": flop / median / 1e9,
        }
        for name, median in times.items()
    }


def _call(
    op: Any, rows: _Sides, caches: list[_Sides], first: int, rest: tuple[Any, ...], copy: int
) -> Tensor:
    return op(*rows, *caches[(copy + first) % len(caches)], *rest)


def _in_turns(calls: dict[str, Callable[[int], Tensor]], seconds: float) -> dict[str, float]:
    """The median seconds of each call: CPU time with one thread, else wall-clock time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    end = time.perf_counter() + seconds
    count = 0
    while count < _MIN_CALLS or (time.perf_counter() < end and count < _MAX_CALLS):
        for name, call in calls.items():
            begin = clock()
            call(count)
            times[name].append(clock() - begin)
        count += 1
    return {name: statistics.median(each) for name, each in times.items()}


def _table(results: list[dict[str, Any]], figure: str) -> str:
    names = list({name: None for result in results for name in result["figures"]})
    keys = ("dtype", "sequences", "rows", "context", "shared")
    header = [*keys, *names]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for result in results:
        cells = [str(result[key]) for key in keys]
        digits = 0 if figure != "gbytes_per_s" else 1
        cells += [
            f"{result['figures'][name][figure]:.{digits}f}" if name in result["figures"] else ""
            for name in names
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16,float32", help="comma-separated")
    parser.add_argument(
        "--cases", default=_CASES, help="comma-separated rows:context[:sequences:shared]"
    )
    parser.add_argument(
        "--heads",
        default="16,8,128",
        help="query heads, key heads, size of a key, and of a value if it differs",
    )
    parser.add_argument("--levels", help="comma-separated instruction sets; default the best two")
    parser.add_argument("--threads", type=int, help="default torch's own")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    parser.add_argument(
        "--cold-mib",
        type=int,
        default=96,
        help="MiB of copies of a KV cache; calls use them in turns",
    )
    parser.add_argument(
        "--save",
        nargs="?",
        const=_FILE,
        metavar="FILE",
        help=f"write FILE ({_FILE}) in the processor's folder",
    )
    options = parser.parse_args(arguments)
    levels = options.levels.split(",") if options.levels else runnable_levels()[:2]
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    for level in levels:
        load("core", level)
    heads = _Heads(*(int(each) for each in options.heads.split(",")))
    conditions = {
        "command": shlex.join(
            ["python", "-m", "ostinato.benchmarks.micro.kernels.ops_attention", *arguments]
        ),
        "cpu": cpu_name(),
        "processor_class": processor_class(),
        "heads": heads._asdict(),
        "fma_gflops": fma_peak(levels[0]),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    meter = LoadMeter().start()
    results: list[dict[str, Any]] = []
    for name in options.dtype.split(","):
        for text in options.cases.split(","):
            case = _Case(*(int(each) for each in text.split(":")))
            figures = measure_case(heads, case, getattr(torch, name), levels, options)
            results.append({"dtype": name, **case._asdict(), "figures": figures})
    conditions["other_programs"] = f"{meter.stop():.0%} of the cores"
    print(json.dumps(conditions, indent=1))
    for title, figure in (
        ("us a call, median", "median_us"),
        ("GB/s of keys and values", "gbytes_per_s"),
        (f"GFLOP/s; {conditions['fma_gflops']:.0f} in registers of a core", "gflops"),
    ):
        print(f"\n{title}\n\n{_table(results, figure)}")
    if options.save:
        path = RESULTS / processor_class() / options.save
        write_json({"conditions": conditions, "results": results}, path)


if __name__ == "__main__":
    main(sys.argv[1:])
