"""Measures the packed linear op beside stock torch: GB/s of weights and GFLOP/s for each shape.

    python -m ostinato.benchmarks.micro.ops_linear
    python -m ostinato.benchmarks.micro.ops_linear --shapes 3072x1024 --rows 1,8,512

Six things take turns, so that a change of the machine's state hits all of them: the packed op, the
quantised op with 8 and 4 bits, `torch.nn.functional.linear`, oneDNN with weights that it has
pre-packed itself (where this torch has them), and a sum over as many bytes as a measure of what the
memory gives. They go round copies
of the weights that exceed the caches, as a decode step goes through its layers. The best and the
median of the calls are printed, with the GB/s of each one's own weights; `share` compares the
packed op's median with the sum's.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ostinato.benchmarks.machine.probes import LoadMeter
from ostinato.ops.linear import pack_linear_weight, packed_linear
from ostinato.ops.native.library import load
from ostinato.ops.quantized import quantize_linear_weight, quantized_linear
from ostinato.ops.quantized_reference import QuantFormat
from ostinato.runtime.startup.machine_info import cpu_name

__all__ = ("measure_rows",)

_FORMATS = (QuantFormat(8, 128, True), QuantFormat(4, 32, True))  # what int8 and int4 default to
_SHAPES = "3072x1024,1024x3072,1408x512,151936x1024"
_ROWS = "1,2,4,8,16,32,128,512"
_MIN_CALLS, _MAX_CALLS = 3, 400


class _Weights(NamedTuple):
    """Copies of one matrix in each form; together they exceed the caches, like a model's layers."""

    stock: list[Tensor]  # [N, K] each
    packed: list[Tensor]
    int8: list[Tensor]
    int4: list[Tensor]
    reordered: list[Tensor]  # oneDNN's own form; empty where this torch has none

    @classmethod
    def make(cls, weight: Tensor, cold_bytes: int) -> Self:
        count = max(1, -(-cold_bytes // weight.nbytes))
        stock = [weight, *(weight.clone() for _ in range(count - 1))]
        packed = [pack_linear_weight(each) for each in stock]
        int8, int4 = (_copies(quantize_linear_weight(weight, f), cold_bytes) for f in _FORMATS)
        onednn = torch.ops.mkldnn
        if not torch.backends.mkldnn.is_available() or not hasattr(
            onednn, "_reorder_linear_weight"
        ):
            return cls(stock, packed, int8, int4, [])
        reordered = [onednn._reorder_linear_weight(each, None) for each in stock]
        return cls(stock, packed, int8, int4, reordered)


def _copies(weight: Tensor, cold_bytes: int) -> list[Tensor]:
    return [weight, *(weight.clone() for _ in range(-(-cold_bytes // weight.nbytes) - 1))]


def _candidates(weights: _Weights, x: Tensor) -> dict[str, Callable[[int], Tensor]]:
    out_features = weights.stock[0].shape[0]
    candidates: dict[str, Callable[[int], Tensor]] = {
        "packed": lambda copy: packed_linear(
            x, weights.packed[copy % len(weights.packed)], None, out_features
        ),
        "int8": lambda copy: quantized_linear(
            x, weights.int8[copy % len(weights.int8)], None, out_features, _FORMATS[0]
        ),
        "int4": lambda copy: quantized_linear(
            x, weights.int4[copy % len(weights.int4)], None, out_features, _FORMATS[1]
        ),
        "stock": lambda copy: torch.nn.functional.linear(
            x, weights.stock[copy % len(weights.stock)]
        ),
    }
    flat = [weight.view(-1).view(torch.float32) for weight in weights.packed]
    # half a round away from the copy that was just multiplied, which the caches may still hold
    candidates["read"] = lambda copy: flat[(copy + len(flat) // 2) % len(flat)].sum()
    if weights.reordered:
        pointwise = torch.ops.mkldnn._linear_pointwise
        candidates["onednn"] = lambda copy: pointwise(
            x, weights.reordered[copy % len(weights.reordered)], None, "none", [], ""
        )
    return candidates


def measure_rows(weights: _Weights, rows: int, seconds: float) -> dict[str, dict[str, float]]:
    """Best and median microseconds of a call, at the best GB/s of weights and GFLOP/s.

    Args:
        weights: the copies that calls go round.
        rows: T.
        seconds: how long to go on, at least three calls of each candidate.

    Returns:
        Figures by candidate: best_us, median_us, gbytes_per_s, gflops.
    """
    weight = weights.stock[0]
    x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
    candidates = _candidates(weights, x)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call(0)
    end = time.perf_counter() + seconds
    count = 0
    while count < _MIN_CALLS or (time.perf_counter() < end and count < _MAX_CALLS):
        for name, call in candidates.items():
            begin = time.perf_counter()
            call(count % (8 * len(weights.stock)))
            times[name].append(time.perf_counter() - begin)
        count += 1
    figures: dict[str, dict[str, float]] = {}
    sizes = {"int8": weights.int8[0].nbytes, "int4": weights.int4[0].nbytes}
    for name, values in times.items():
        best = min(values)
        figures[name] = {
            "best_us": best * 1e6,
            "median_us": statistics.median(values) * 1e6,
            "gbytes_per_s": sizes.get(name, weight.nbytes) / best / 1e9,
            "gflops": 2 * rows * weight.numel() / best / 1e9,
        }
    return figures


def _report(label: str, figures: dict[str, dict[str, float]]) -> None:
    cells = [
        f"{name} {f['best_us']:9.1f} us ({f['median_us']:9.1f}) {f['gbytes_per_s']:6.1f} GB/s "
        + (f"{f['gflops']:5.0f} GFLOP/s" if name != "read" else "")
        for name, f in figures.items()
    ]
    share = figures["read"]["median_us"] / figures["packed"]["median_us"]
    print(f"{label}  share {share:4.0%}  " + "  | ".join(cells))
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16,float32", help="comma-separated")
    parser.add_argument("--shapes", default=_SHAPES, help="comma-separated NxK")
    parser.add_argument("--rows", default=_ROWS, help="comma-separated numbers of rows")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each shape and rows")
    parser.add_argument(
        "--cold-mib", type=int, default=96, help="go round copies of the weights of this size"
    )
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    conditions = {
        "cpu": cpu_name(),
        "isa": load("core").isa,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(conditions))
    meter = LoadMeter().start()
    results = []
    for dtype_name in options.dtype.split(","):
        for shape in options.shapes.split(","):
            out_features, in_features = (int(size) for size in shape.split("x"))
            weight = torch.randn(out_features, in_features).to(getattr(torch, dtype_name))
            weights = _Weights.make(weight, options.cold_mib << 20)
            for rows in (int(count) for count in options.rows.split(",")):
                figures = measure_rows(weights, rows, options.seconds)
                _report(f"{dtype_name:8} {shape:>11} T={rows:<4}", figures)
                results.append(
                    {
                        "dtype": dtype_name,
                        "out_features": out_features,
                        "in_features": in_features,
                        "rows": rows,
                        "figures": figures,
                    }
                )
            del weight, weights
            gc.collect()
    print(f"other programs used {meter.stop():.0%} of the cores")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"conditions": conditions, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
