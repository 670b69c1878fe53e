"""How many CPU threads a step's loops get besides our own kernels'.

A parallel loop ends in a barrier that costs microseconds on an idle machine and a scheduler's time
slice on a busy one, and a decode step has several such loops per layer with next to nothing to do.
So they run on one thread in small steps, and in all steps of a program that has none worth
mentioning. The matrix and attention kernels then share their work with threads that nobody has to
wait for (ops/native/crew.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ("StepThreads",)

# Up to this many tokens a layer's element-wise work (some 10,000 numbers) is worth no barrier.
_SERIAL_TOKENS = 16


class StepThreads:
    """Switches OpenMP's number of threads around a step.

    Args:
        threads: what other steps, and everything outside of steps, use.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # The OpenMP runtime that torch has loaded; a torch without OpenMP has nothing to switch.
        self._set = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)

    @contextmanager
    def for_step(self, num_tokens: int, *, has_loops: bool) -> Iterator[None]:
        """Hold them during a step of so many tokens, whose program may have such loops or not."""
        if self._set is None or (has_loops and num_tokens > _SERIAL_TOKENS):
            yield
            return
        self._set(1)
        try:
            yield
        finally:
            self._set(self._threads)
