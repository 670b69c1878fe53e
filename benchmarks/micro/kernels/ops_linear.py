"""Compares the linear ops with torch and oneDNN: GB/s of weights and GFLOP/s for each shape.

    python -m ostinato.benchmarks.micro.kernels.ops_linear --threads 1
    python -m ostinato.benchmarks.micro.kernels.ops_linear \\
        --shapes 3072x1024 --rows 1,8,512 --kinds packed
    python -m ostinato.benchmarks.micro.kernels.ops_linear \\
        --threads 1 --dtype bfloat16,float32 --save
    python -m ostinato.benchmarks.micro.kernels.ops_linear --show FILE

The candidates are, for each instruction set (`--levels`), the packed op, the op for compressed
weights (`compressed`, bfloat16), and the quantised op with 8 and 4 bits, in the default groups
(`int8`, `int4`) or others (`int8-32`), and with floats of 8 bits (`fp8`);
`torch.nn.functional.linear`; and oneDNN with weights in its own packed form, if this torch and this
processor support that for the dtype. A sum over the bytes of the weights measures
the bandwidth of the memory. Calls of all candidates alternate, so that a change of the machine's
state affects all. Each call uses another copy of the weights. All copies together exceed the
processor's caches, like the layers of a model.

With one thread, times are CPU times of that thread. Other programs can make them longer only by
using caches and memory too. With several threads, times are wall-clock times.

The tables have the median time of a call in microseconds. For few rows they have GB/s of weights,
and the GB/s of the sum. For many rows they have GFLOP/s, and the measured rate of multiply-adds in
registers (benchmarks/machine/fma_rate.cpp). `--save` keeps all figures in the folder of the
processor's class (benchmarks/machine/processor.py), `--show` prints the tables of a kept file.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ostinato.benchmarks.machine.probes import LoadMeter
from ostinato.benchmarks.machine.processor import RESULTS, fma_peak, processor_class
from ostinato.benchmarks.report.json_file import write_json
from ostinato.ops.linear.compressed_linear import compress_linear_weight
from ostinato.ops.linear.packed_linear import pack_linear_weight
from ostinato.ops.native.build import LIBRARIES
from ostinato.ops.native.instruction_sets import runnable_levels
from ostinato.ops.native.library import load
from ostinato.ops.quantized import pack_quantized_weight, quantize_linear_weight
from ostinato.ops.quantized_reference import QuantFormat
from ostinato.runtime.machine_info import cpu_name

__all__ = ("measure_rows",)

_GROUPS = {"int8": 128, "int4": 32, "fp8": 128}  # the default group sizes
_SHAPES = "3072x1024,1024x3072,6144x1024,1024x1024"
_ROWS = "1,4,16,32,64,128,512"
_KINDS = ("packed", "int8", "int4")
_UNQUANTIZED = ("packed", "compressed")
_MIN_CALLS, _MAX_CALLS = 3, 400
_FEW_ROWS = 4  # up to this number of rows memory is the limit, and the table has GB/s
_FILE = "ops-linear.json"


class _Weights(NamedTuple):
    """Copies of one matrix in each form; together they exceed the caches, like a model's layers."""

    stock: list[Tensor]  # [N, K] each
    packed: list[Tensor]
    compressed: list[tuple[Tensor, Tensor]]
    quantized: dict[str, tuple[QuantFormat, list[Tensor]]]  # by kind
    reordered: list[Tensor]  # in oneDNN's form; empty if this torch has none

    @classmethod
    def make(cls, weight: Tensor, cold_bytes: int, kinds: list[str]) -> Self:
        count = max(1, -(-cold_bytes // weight.nbytes))
        stock = [weight, *(weight.clone() for _ in range(count - 1))]
        packed = [pack_linear_weight(each) for each in stock]
        compressed = [compress_linear_weight(each) for each in stock if "compressed" in kinds]
        quantized = {
            kind: (form, _copies(_quantized(weight, form), cold_bytes))
            for kind, form in ((kind, _form(kind)) for kind in kinds if kind not in _UNQUANTIZED)
        }
        return cls(stock, packed, compressed, quantized, _reordered(stock))


def _form(kind: str) -> QuantFormat:
    """The symmetric format of a kind: `int8`, `int4` or `fp8`, and `-32` for groups of 32.

    Raises:
        ValueError: the text is not of this form.
    """
    name, _, size = kind.partition("-")
    if name not in _GROUPS or (size and not size.isdecimal()):
        raise ValueError(f"--kinds={kind}: use packed, compressed, int8, int4, fp8, int8-SIZE, ...")
    group_size = int(size or _GROUPS[name])
    if name == "fp8":
        return QuantFormat(8, group_size, True, "float32", "e4m3")
    return QuantFormat(int(name[3:]), group_size, True)


def _quantized(weight: Tensor, form: QuantFormat) -> Tensor:
    """The weight in a format; floats of 8 bits get the scale 1 / 64."""
    if form.kind != "e4m3":
        return quantize_linear_weight(weight, form)
    floats = (weight.float() * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.full((len(weight), -(-weight.shape[1] // form.group_size)), 1 / 64)
    return pack_quantized_weight(floats.view(torch.uint8), scales, None, form)


def _reordered(weights: list[Tensor]) -> list[Tensor]:
    """The weights in oneDNN's own form; empty if oneDNN cannot multiply them on this processor."""
    onednn = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(onednn, "_reorder_linear_weight"):
        return []
    try:
        reordered = [onednn._reorder_linear_weight(each, None) for each in weights]
        row = weights[0].new_zeros(1, weights[0].shape[1])
        onednn._linear_pointwise(row, reordered[0], None, "none", [], "")
    except RuntimeError:  # bfloat16 without AVX-512
        return []
    return reordered


def _copies(weight: Tensor, cold_bytes: int) -> list[Tensor]:
    return [weight, *(weight.clone() for _ in range(-(-cold_bytes // weight.nbytes) - 1))]


def _candidates(
    weights: _Weights, x: Tensor, levels: list[str], kinds: list[str]
) -> dict[str, Callable[[int], Tensor]]:
    out_features = weights.stock[0].shape[0]
    candidates: dict[str, Callable[[int], Tensor]] = {}
    for index, level in enumerate(levels):
        ops = getattr(torch.ops, f"ostinato_{level}")
        # Each level begins at another copy, because a copy that was just read is in the cache.
        part = index / len(levels)

        def of(copies: list[Any], copy: int, part: float = part) -> Any:
            return copies[(copy + int(part * len(copies))) % len(copies)]

        if "packed" in kinds:
            candidates[f"{level} packed"] = lambda copy, op=ops.packed_linear, of=of: op(
                x, of(weights.packed, copy), None, out_features, False
            )
        if weights.compressed:
            candidates[f"{level} compressed"] = lambda copy, op=ops.compressed_linear, of=of: op(
                x, *of(weights.compressed, copy), None, out_features, False
            )
        for name, (form, copies) in weights.quantized.items():
            candidates[f"{level} {name}"] = lambda copy, op=ops, w=copies, f=form, of=of: (
                op.quantized_linear(x, of(w, copy), None, out_features, False, None, None, *f)
            )
    candidates["stock"] = lambda copy: torch.nn.functional.linear(
        x, weights.stock[copy % len(weights.stock)]
    )
    flat = [weight.view(-1).view(torch.float32) for weight in weights.packed]
    candidates["read"] = lambda copy: flat[(copy + 3 * len(flat) // 4) % len(flat)].sum()
    if weights.reordered:
        pointwise = torch.ops.mkldnn._linear_pointwise
        candidates["onednn"] = lambda copy: pointwise(
            x, weights.reordered[copy % len(weights.reordered)], None, "none", [], ""
        )
    return candidates


def measure_rows(
    weights: _Weights, rows: int, seconds: float, levels: list[str], kinds: list[str]
) -> dict[str, dict[str, float]]:
    """Best and median microseconds of a call, and the GB/s of weights and GFLOP/s of the median.

    Args:
        weights: the copies that calls use in turns.
        rows: rows of the input.
        seconds: duration of the measurement; at least three calls of each candidate are made.
        levels: instruction sets whose libraries are loaded.
        kinds: kinds of this project's ops; the quantised ones are those of `weights`.

    Returns:
        Figures by candidate: best_us, median_us, gbytes_per_s, gflops.
    """
    weight = weights.stock[0]
    x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
    candidates = _candidates(weights, x, levels, kinds)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call(0)
    end = time.perf_counter() + seconds
    count = 0
    while count < _MIN_CALLS or (time.perf_counter() < end and count < _MAX_CALLS):
        for name, call in candidates.items():
            begin = clock()
            call(count % (8 * len(weights.stock)))
            times[name].append(clock() - begin)
        count += 1
    figures: dict[str, dict[str, float]] = {}
    sizes = {kind: copies[0].nbytes for kind, (_, copies) in weights.quantized.items()}
    sizes["compressed"] = sum(tensor.nbytes for each in weights.compressed[:1] for tensor in each)
    for name, values in times.items():
        median = statistics.median(values)
        figures[name] = {
            "best_us": min(values) * 1e6,
            "median_us": median * 1e6,
            "gbytes_per_s": sizes.get(name.rpartition(" ")[2], weight.nbytes) / median / 1e9,
            "gflops": 2 * rows * weight.numel() / median / 1e9,
        }
    return figures


class _Result(NamedTuple):
    """The figures for one number of rows and one shape."""

    dtype: str
    out_features: int
    in_features: int
    rows: int
    figures: dict[str, dict[str, float]]


def _tables(conditions: dict[str, Any], results: list[_Result]) -> str:
    """Markdown tables of all results."""
    peak = conditions["fma_gflops"] * conditions["threads"]
    few = [each for each in results if each.rows <= _FEW_ROWS]
    many = [each for each in results if each.rows > _FEW_ROWS]
    return "\n\n".join(
        f"{title}\n\n{_table(chosen, figure)}"
        for title, figure, chosen in (
            ("us a call, median", "median_us", results),
            ("GB/s of weights, median", "gbytes_per_s", few),
            (f"GFLOP/s of the median; {peak:.0f} in registers", "gflops", many),
        )
        if chosen
    )


def _table(results: list[_Result], figure: str) -> str:
    """A Markdown table of one figure."""
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    if figure == "gflops":
        names.remove("read")
    header = ["dtype", "N x K", "rows", *names]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for result in results:
        cells = [result.dtype, f"{result.out_features} x {result.in_features}", str(result.rows)]
        for name in names:
            value = result.figures.get(name, {}).get(figure)
            cells.append("" if value is None else f"{value:.{0 if value >= 10 else 1}f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measure(options: argparse.Namespace, levels: list[str]) -> list[_Result]:
    results: list[_Result] = []
    for dtype_name in options.dtype.split(","):
        for shape in options.shapes.split(","):
            out_features, in_features = (int(size) for size in shape.split("x"))
            weight = torch.randn(out_features, in_features).to(getattr(torch, dtype_name))
            kinds = options.kinds.split(",")
            weights = _Weights.make(weight, options.cold_mib << 20, kinds)
            for rows in (int(count) for count in options.rows.split(",")):
                figures = measure_rows(weights, rows, options.seconds, levels, kinds)
                results.append(_Result(dtype_name, out_features, in_features, rows, figures))
            del weight, weights
            gc.collect()
    return results


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", help="comma-separated")
    parser.add_argument("--shapes", default=_SHAPES, help="comma-separated NxK")
    parser.add_argument("--rows", default=_ROWS, help="comma-separated numbers of rows")
    parser.add_argument("--levels", help="comma-separated instruction sets; default the best two")
    parser.add_argument(
        "--kinds",
        default=",".join(_KINDS),
        help="comma-separated ops of this project: packed, int8, int4, fp8, int8-32, int4-128, ...",
    )
    parser.add_argument("--threads", type=int, help="default torch's own")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape and rows")
    parser.add_argument(
        "--cold-mib",
        type=int,
        default=96,
        help="MiB of copies of the weights; calls take turns with them, so that caches are cold",
    )
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument(
        "--save", action="store_true", help=f"write figures to {_FILE} in the processor's folder"
    )
    parser.add_argument(
        "--show", type=Path, help="print the tables of a kept file, measure nothing"
    )
    options = parser.parse_args(arguments)
    if options.show is not None:
        kept = json.loads(options.show.read_text())
        print(_tables(kept["conditions"], [_Result(**each) for each in kept["results"]]))
        return
    levels = options.levels.split(",") if options.levels else runnable_levels()[:2]
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    for level in levels:
        for library in LIBRARIES:
            load(library, level)
    conditions = {
        "command": shlex.join(
            ["python", "-m", "ostinato.benchmarks.micro.kernels.ops_linear", *arguments]
        ),
        "cpu": cpu_name(),
        "processor_class": processor_class(),
        "levels": levels,
        "fma_gflops": fma_peak(levels[0]),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "median_of_calls": f"{options.seconds} s a row, at most {_MAX_CALLS} each, in turns",
        "clock": "CPU time" if torch.get_num_threads() == 1 else "wall time",
    }
    meter = LoadMeter().start()
    results = _measure(options, levels)
    conditions["other_programs"] = f"{meter.stop():.0%} of the cores"
    print(json.dumps(conditions, indent=1))
    print(f"\n{_tables(conditions, results)}")
    path = RESULTS / processor_class() / _FILE if options.save else options.json
    if path is not None:
        rows = [result._asdict() for result in results]
        write_json({"conditions": conditions, "results": rows}, path)


if __name__ == "__main__":
    main(sys.argv[1:])
