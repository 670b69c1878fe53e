"""Times launches of a kernel in a CUDA graph, as a captured decode step launches them."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

__all__ = ("graph_us",)

_REPEATS = 7


def graph_us(call: Callable[[int], object], launches: int) -> float:
    """Median microseconds of one of `launches` calls in a CUDA graph.

    Args:
        call: launches the kernel once; takes the index of the call.
        launches: calls in the graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            call(index)
    graph.replay()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / launches)
    return statistics.median(times)
