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

_SIDES = (256, 512, 1024)
_REPEATS = 5
# After a product that takes longer, no larger one is tried. torch multiplies bfloat16 at 1 GFLOP/s
# on processors without instructions for it.
_LONG_S = 0.02


def machine_of(device: torch.device, dtype: torch.dtype) -> Machine:
    """Bandwidth and matrix rate. On a CPU, the best of several tries, because its speed varies.

    On a CPU the matrix rate is that of float32 where it is higher: a kernel can widen 16 bits.
    """
    if device.type == "cuda":
        return measure_machine(device, dtype, tiny=False)
    rate = max(_matmul_flop_s(kind) for kind in {dtype, torch.float32})
    return Machine(copy_bytes_s=read_bandwidth(device) * 1e9, matmul_flop_s=rate)


def _matmul_flop_s(dtype: torch.dtype) -> float:
    """The best rate of torch's matrix products on the CPU, in operations per second."""
    best = 0.0
    for side in _SIDES:
        left, right = (torch.randn(side, side).to(dtype) for _ in range(2))
        least = float("inf")
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            torch.mm(left, right)
            least = min(least, time.perf_counter() - begin)
        best = max(best, 2 * side**3 / least)
        if least > _LONG_S:
            break
    return best


def measure_rates(config: RunConfig, device: torch.device) -> tuple[ModelSizes, Machine]:
    """The sizes of the configured model, and the rates of this machine.

    Raises:
        StartupError: the model cannot be opened.
    """
    set_threads(config.device)
    source = open_model(config)
    sizes = sizes_of(source.config, source.dtype, source.cache_dtype)
    return sizes, machine_of(device, source.dtype)
