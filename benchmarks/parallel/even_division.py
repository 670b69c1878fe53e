"""Measures what two ranks can reach at most on the cores of this machine.

Two ranks have equal parts of the model, and each waits for the other after every layer. If one core
is slower for a while, for instance because another virtual machine uses it, the other core waits.
The threads of one process share their work instead, so a faster core does more of it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Self

__all__ = ("EvenDivision", "limit_of")

_SLICE_S = 0.01  # a layer of a prompt takes about this long
_WAIT_S = 60.0


def limit_of(first: list[int], second: list[int]) -> float:
    """The speed of two cores that get equal work, divided by their speed if they share the work.

    Args:
        first: products that a core computed in each slice of time.
        second: those of another core in the same slices.
    """
    return 2 * sum(map(min, first, second)) / (sum(first) + sum(second))


class EvenDivision:
    """Two processes, each on a core of its own, that multiply matrices when they are asked."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._barrier = context.Barrier(2)  # its semaphores exist as long as this object
        self._ends: list[Connection] = []
        self._processes = []
        for core in sorted(os.sched_getaffinity(0))[:2]:
            end, other = context.Pipe()
            process = context.Process(target=_serve, args=(core, other, self._barrier), daemon=True)
            process.start()
            other.close()
            self._ends.append(end)
            self._processes.append(process)

    def measure(self, seconds: float) -> float:
        """`limit_of` both cores during some seconds.

        Raises:
            EOFError: a process has ended.
        """
        for end in self._ends:
            end.send(max(1, round(seconds / _SLICE_S)))
        first, second = (end.recv() for end in self._ends)
        return limit_of(first, second)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join()


def _serve(core: int, connection: Connection, barrier: Barrier) -> None:
    """Multiply for as many slices as each message says; send the number of products of each."""
    os.sched_setaffinity(0, {core})
    import numpy as np  # afterwards: the library computes with as many threads as it may use cores

    rows = np.ones((64, 512), dtype=np.float32)
    weights = np.ones((512, 512), dtype=np.float32)
    product = rows @ weights
    while True:
        try:
            num_slices = connection.recv()
        except EOFError:
            return
        counts = []
        for _ in range(num_slices):
            barrier.wait(_WAIT_S)
            end, count = time.perf_counter() + _SLICE_S, 0
            while time.perf_counter() < end:
                np.matmul(rows, weights, out=product)
                count += 1
            counts.append(count)
        connection.send(counts)
