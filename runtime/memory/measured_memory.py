"""Measures memory on a CUDA device, to replace the estimates of the memory plan.

    weights, buffers and workspaces are allocated       -> used memory
    the largest step runs with a KV cache of one block  -> peak memory of a step
    the KV cache gets the rest, then graphs are captured
    free memory after the capture                       -> compared with the plan

The memory of the graphs stays an estimate, because they can be captured only with the final cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ostinato.runtime.memory.footprint import MeasuredMemory
from ostinato.runtime.memory.memory_plan import MemoryPlan

__all__ = ("CudaMemory", "DeviceMemory", "compare_with_plan", "measure")

_MIB = 1 << 20


class DeviceMemory(Protocol):
    """The memory figures of a device, in bytes."""

    def free(self) -> int:
        """Free bytes, after this process has returned its cached allocations to the device."""
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
        # Count reserved memory: the KV cache cannot use gaps between the allocations in it.
        return torch.cuda.max_memory_reserved() - before


def measure(
    memory: DeviceMemory, largest_step: Callable[[], None], *, free_before: int
) -> MeasuredMemory:
    """Measure memory before the KV cache is allocated.

    Args:
        memory: the device's memory.
        largest_step: runs the largest possible step, uncaptured.
        free_before: free bytes before this engine allocated anything.
    """
    step_bytes = memory.peak_of(largest_step)
    # Libraries allocate at their first use, so free memory is read after the step.
    return MeasuredMemory(used_bytes=max(0, free_before - memory.free()), step_bytes=step_bytes)


def compare_with_plan(plan: MemoryPlan, *, free_before_capture: int, free_now: int) -> str:
    """One sentence with the memory of the captured graphs, measured and planned.

    Args:
        plan: the plan that the engine was built with.
        free_before_capture: free bytes before the capture of the first graph.
        free_now: free bytes after the capture of the last graph.
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
