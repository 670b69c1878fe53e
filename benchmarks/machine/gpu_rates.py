"""Measures how fast a device copies memory and multiplies matrices.

Calls on a GPU are timed with CUDA events, calls on a CPU by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ostinato.benchmarks.machine.roofline import Machine

__all__ = ("measure_machine", "time_calls")

_REPEATS = 20


def time_calls(call: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median seconds of a call on the device, after three calls that are not counted."""
    for _ in range(3):
        call()
    seconds: list[float] = []
    if device.type != "cuda":
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for begin_event, end_event in events:
        begin_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) / 1000 for one, other in events)


def measure_machine(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Machine:
    """Measures with a copy of 2**29 numbers and with a product of two 8192 x 8192 matrices.

    With `tiny`, 2**22 numbers are copied and the matrices are 512 x 512.
    """
    count, side = (1 << 22, 512) if tiny else (1 << 29, 8192)
    return Machine(
        copy_bytes_s=_copy_rate(device, dtype, count),
        matmul_flop_s=_matmul_rate(device, dtype, side),
    )


def _copy_rate(device: torch.device, dtype: torch.dtype, count: int) -> float:
    source = torch.randn(count, device=device, dtype=dtype)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_calls(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / time_calls(lambda: torch.mm(left, right, out=out), device)
