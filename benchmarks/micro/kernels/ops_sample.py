"""Compares sampling of tokens from logits by the C++ op and by torch, in turns.

    python -m ostinato.benchmarks.micro.kernels.ops_sample
    python -m ostinato.benchmarks.micro.kernels.ops_sample \\
        --vocabularies 32000 --rows 1,64 --json FILE

It prints the best and median milliseconds of a call on random logits, for every way of sampling.
Logits have a standard deviation of 3. Flat logits have 0.1, so that top-p keeps most of the
vocabulary.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.benchmarks.machine.probes import LoadMeter
from ostinato.benchmarks.report.json_file import write_json
from ostinato.ops.native.library import load
from ostinato.ops.sampling.sample_rows import (
    RowSampling,
    SampleInputs,
    SamplePath,
    sample_each,
    sample_rows,
    sampling_inputs,
)
from ostinato.runtime.machine_info import cpu_name

__all__ = ("measure_sampling",)

_SPREAD, _FLAT_SPREAD = 3.0, 0.1
_MAX_CALLS = 20
_BUDGET_S = 0.5  # seconds for one way of sampling, both implementations


def _ways(vocabulary: int) -> dict[str, tuple[RowSampling, float]]:
    """{way of sampling: (parameters of a row, standard deviation of its logits)}."""
    v = vocabulary
    top_p = RowSampling(SamplePath.wide, 1.0, v, 0.95, 0.0, 0.5)
    return {
        "greedy": (RowSampling(SamplePath.greedy, 1.0, v, 1.0, 0.0, 0.5), _SPREAD),
        "temperature": (RowSampling(SamplePath.full, 1.0, v, 1.0, 0.0, 0.5), _SPREAD),
        "top-k 50": (RowSampling(SamplePath.narrow, 1.0, 50, 1.0, 0.0, 0.5), _SPREAD),
        "top-p 0.95": (top_p, _SPREAD),
        "top-p, flat": (top_p, _FLAT_SPREAD),
        "min-p 0.05": (RowSampling(SamplePath.wide, 1.0, v, 1.0, 0.05, 0.5), _SPREAD),
    }


def _in_turns(calls: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + _BUDGET_S
    for _ in range(_MAX_CALLS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
        if time.perf_counter() > end:
            break
    return seconds


def measure_sampling(vocabulary: int, num_rows: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each call by way of sampling and by form (`native`, `torch`)."""
    normal = torch.randn(num_rows, vocabulary)
    found = {}
    for name, (row, spread) in _ways(vocabulary).items():
        logits = normal * spread
        rows = [row] * num_rows
        inputs = SampleInputs(*torch.tensor(rows, dtype=torch.float64).t().contiguous())
        calls: dict[str, Callable[[], Tensor]] = {
            "native": functools.partial(sample_each, logits, sampling_inputs(rows)),
            "torch": functools.partial(sample_rows, logits, inputs, {row.path}),
        }
        found[name] = _in_turns(calls)
    return found


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabularies", default="32000,151936")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--json", type=Path, help="write every call's seconds to this file")
    options = parser.parse_args(arguments)
    load("core")
    conditions: dict[str, Any] = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(conditions))
    meter, results = LoadMeter(), []
    for vocabulary in map(int, options.vocabularies.split(",")):
        for num_rows in map(int, options.rows.split(",")):
            for name, forms in measure_sampling(vocabulary, num_rows).items():
                results.append({"vocabulary": vocabulary, "rows": num_rows, "way": name, **forms})
                native, plain = (
                    f"{1e3 * statistics.median(forms[form]):9.3f} ({1e3 * min(forms[form]):9.3f})"
                    for form in ("native", "torch")
                )
                case = f"V={vocabulary:6d} R={num_rows:3d} {name:12s}"
                print(f"{case} native {native} ms | torch {plain} ms")
    conditions["other_cpu"] = meter.stop()
    if options.json is not None:
        write_json({"conditions": conditions, "results": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
