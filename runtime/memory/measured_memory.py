"""Measures memory on a CUDA device, to replace the estimates of the memory plan.

    weights, buffers and workspaces have their memory   -> used
    the largest step runs on a cache of one block       -> its peak
    the KV cache is made of what is left, graphs are captured
    what is free then                                   -> was the plan right?

The graphs themselves stay an estimate: they can only be captured over the final cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ostinato.runtime.memory.memory_plan import MeasuredMemory, MemoryPlan

__all__ = ("CudaMemory", "DeviceMemory", "compare_with_plan", "measure")

_MIB = 1 << 20


class DeviceMemory(Protocol):
    """The memory figures of a device, in bytes."""

    def free(self) -> int:
        """Free for anyone, after this process has given back what it holds in reserve."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """The peak of memory during `run`, beyond the memory at its start."""
        ...


class CudaMemory:
    """The current CUDA device."""

    def free(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def peak_of(self, run: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        run()
        torch.cuda.synchronize()
        # Reserved rather than allocated: what fragments take can not be given to the cache either.
        return torch.cuda.max_memory_reserved() - before


def measure(
    memory: DeviceMemory, largest_step: Callable[[], None], *, free_before: int
) -> MeasuredMemory:
    """What the plan needs to know before the KV cache is made.

    Args:
        memory: of the device.
        largest_step: runs the largest step that there can be, uncaptured.
        free_before: free bytes before anything of this engine was there.
    """
    step_bytes = memory.peak_of(largest_step)
    # Libraries take their memory at their first use, which the step was.
    return MeasuredMemory(used_bytes=max(0, free_before - memory.free()), step_bytes=step_bytes)


def compare_with_plan(plan: MemoryPlan, *, free_before_capture: int, free_now: int) -> str:
    """One sentence with the memory of the captured graphs, measured and planned.

    Args:
        plan: that the engine was built by.
        free_before_capture: free bytes before the first graph.
        free_now: free bytes after the last.
    """
    took = free_before_capture - free_now
    text = (
        f"captured graphs took {took / _MIB:.0f} MiB, {plan.graph_bytes / _MIB:.0f} were planned; "
        f"{free_now / _MIB:.0f} MiB are free"
    )
    short = plan.activation_bytes - free_now
    if short > 0:
        text += (
            f", {short / _MIB:.0f} less than the largest uncaptured step may take: lower "
            "device.memory_fraction or cache.memory_gib"
        )
    return text
