"""How many CPU threads a step uses: torch's OpenMP loops on the one hand, our kernels on the other.

An OpenMP loop ends in a barrier. The barrier costs microseconds on an idle machine and a
scheduler's time slice on a busy one, and a decode step has several such loops per layer with hardly
any work in them. So OpenMP loops run on one thread in small steps, and in every step of a program
that has no loops worth several threads. The matrix and attention kernels then share their work
through a thread pool that waits for no thread that has not started
(ops/native/core/thread_pool.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from ostinato.ops.native.library import pool_threads_setter

__all__ = ("StepThreads",)

# Up to this many tokens the element-wise work of a layer (some 10,000 numbers) is worth no barrier.
_SERIAL_TOKENS = 16


class StepThreads:
    """Chooses the threads of a step. The choice holds for the calling thread only.

    Args:
        threads: of our kernels in every step, and of OpenMP loops outside of small steps.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._set_pool = pool_threads_setter()
        # From the OpenMP runtime that torch has loaded; None if torch was built without OpenMP.
        self._set_openmp = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)

    @contextmanager
    def for_step(self, num_tokens: int, *, has_loops: bool) -> Iterator[None]:
        """Hold the choice during a step.

        Args:
            num_tokens: of the step.
            has_loops: whether its program may contain OpenMP loops.
        """
        if self._set_openmp is None or (has_loops and num_tokens > _SERIAL_TOKENS):
            yield
            return
        self._set_openmp(1)
        self._set_pool(self._threads)
        try:
            yield
        finally:
            self._set_pool(0)
            self._set_openmp(self._threads)
