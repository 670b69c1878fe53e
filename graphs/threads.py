"""How many CPU threads a step uses: torch's OpenMP loops on the one hand, our kernels on the other.

An OpenMP loop ends in a barrier. The barrier costs microseconds on an idle machine and a
scheduler's time slice on a busy one, and a decode step has several such loops per layer with hardly
any work in them. So OpenMP loops run on one thread in small steps, and in every step of a program
that has no loops worth several threads. The matrix and attention kernels then share their work
through a thread pool that waits for no thread that has not started
(ops/native/core/thread_pool.h).

MKL, which computes torch's `exp`, has a number of threads of its own that OpenMP's does not change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ostinato.ops.native.library import pool_threads_setter

__all__ = ("StepThreads",)

# Up to this many tokens the element-wise work of a layer (some 10,000 numbers) is worth no barrier.
_SERIAL_TOKENS = 16
# Up to this many numbers an operation on logits takes less than a barrier may.
_SERIAL_NUMBERS = 1 << 20


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
        self._set_mkl = _mkl_threads_setter()
        self._is_held = False

    @contextmanager
    def for_step(self, num_tokens: int, *, has_loops: bool) -> Iterator[None]:
        """Hold the choice during a step, or a part of it; the choice of a part with loops is kept.

        Args:
            num_tokens: of the step.
            has_loops: whether its program may contain OpenMP loops.
        """
        if self._set_openmp is None or self._is_held:
            yield
            return
        if has_loops and num_tokens > _SERIAL_TOKENS:
            yield
            return
        self._is_held = True
        self._set_openmp(1)
        self._set_pool(self._threads)
        try:
            yield
        finally:
            self._is_held = False
            self._set_pool(0)
            self._set_openmp(self._threads)

    @contextmanager
    def for_logits(self, num_numbers: int) -> Iterator[None]:
        """Hold the choice during operations on logits, none of which is a matrix product.

        Args:
            num_numbers: of the logits.
        """
        if num_numbers > _SERIAL_NUMBERS:
            yield
            return
        set_mkl = self._set_mkl or (lambda number: 0)
        with self.for_step(0, has_loops=False):
            before = set_mkl(1)
            try:
                yield
            finally:
                set_mkl(before)


def _mkl_threads_setter() -> Callable[[int], int] | None:
    """Sets the threads of MKL for the calling thread and returns what they were, 0 = not set.

    None if torch was built without MKL.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return getattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local", None)
    except OSError:
        return None
