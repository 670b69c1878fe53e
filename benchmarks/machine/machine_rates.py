"""Measures this machine's memory bandwidth and its rate of matrix products in a model's type.

The bandwidth is that of reads on a CPU, and that of a copy on CUDA.
"""

from __future__ import annotations

import time

import torch

from ostinato.benchmarks.machine.gpu_rates import measure_machine
from ostinato.benchmarks.machine.probes import read_bandwidth
from ostinato.benchmarks.machine.roofline import Machine, ModelSizes, sizes_of
from ostinato.conf.root import RunConfig
from ostinato.runtime.startup.plan.device import set_threads
from ostinato.runtime.startup.plan.model_source import open_model

__all__ = ("machine_of", "measure_rates")

_SIDE = 1024
_REPEATS = 5


def machine_of(device: torch.device, dtype: torch.dtype) -> Machine:
    """Bandwidth and matrix rate. On a CPU, the best of several tries, because its speed varies."""
    if device.type == "cuda":
        return measure_machine(device, dtype, tiny=False)
    left, right = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - begin)
    return Machine(copy_bytes_s=read_bandwidth(device) * 1e9, matmul_flop_s=2 * _SIDE**3 / best)


def measure_rates(config: RunConfig, device: torch.device) -> tuple[ModelSizes, Machine]:
    """The sizes of the configured model, and the rates of this machine.

    Raises:
        StartupError: the model cannot be opened.
    """
    set_threads(config.device)
    source = open_model(config)
    sizes = sizes_of(source.config, source.dtype, source.cache_dtype)
    return sizes, machine_of(device, source.dtype)
