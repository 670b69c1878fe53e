"""Chooses the number of CPU threads of a step, for torch's OpenMP loops and for our kernels.

An OpenMP loop ends in a barrier. The barrier costs microseconds on an idle machine and a
scheduler's time slice on a busy one, and a decode step has several such loops per layer with hardly
any work in them. So OpenMP loops run on one thread in steps of up to 16 tokens, and in every step
of a program of only this package's kernels. The matrix and attention kernels then share their work
through a thread pool, which does not wait for threads that have not started
(ops/native/core/thread_pool.h).

MKL computes torch's `exp`. Its number of threads is set separately from that of OpenMP.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from ostinato.ops.native.library import pool_threads_setter

__all__ = ("StepThreads",)

# Up to this many tokens the element-wise work of a layer (some 10,000 numbers) costs less than a
# barrier.
_SERIAL_TOKENS = 16
# Up to this many numbers an operation on logits takes less time than a barrier can take.
_SERIAL_NUMBERS = 1 << 20


class StepThreads:
    """Chooses the threads of a step. The choice holds for the calling thread only.

    Args:
        threads: for our kernels in every step, and for OpenMP loops unless they run on one thread.
    """

    def __init__(self, threads: int) -> None:
        # From the OpenMP runtime that torch has loaded; None if torch was built without OpenMP.
        set_openmp = getattr(ctypes.PyDLL(None), "omp_set_num_threads", None)
        self._free: AbstractContextManager[None] = nullcontext()
        self._serial = (
            self._free
            if set_openmp is None
            else _SerialLoops(set_openmp, pool_threads_setter(), threads)
        )
        self._serial_logits = _SerialLogits(self._serial, _mkl_threads_setter())

    def for_step(self, num_tokens: int, *, has_loops: bool) -> AbstractContextManager[None]:
        """A context that sets the numbers of threads for a step or a part of it; can be nested.

        Args:
            num_tokens: tokens of the step.
            has_loops: whether its program may contain OpenMP loops.
        """
        return self._free if has_loops and num_tokens > _SERIAL_TOKENS else self._serial

    def for_logits(self, num_numbers: int) -> AbstractContextManager[None]:
        """A context that sets the threads for operations on logits other than matrix products.

        Args:
            num_numbers: how many logits the step has.
        """
        return self._free if num_numbers > _SERIAL_NUMBERS else self._serial_logits


class _SerialLoops(AbstractContextManager[None]):
    """OpenMP loops on one thread, our kernels on all threads of the engine.

    This is a class, because a context manager made of a generator takes twice the time, and each
    step enters one or two. If contexts are nested, the inner ones change nothing.
    """

    __slots__ = ("_depth", "_set_openmp", "_set_pool", "_threads")

    def __init__(
        self, set_openmp: Callable[[int], object], set_pool: Callable[[int], object], threads: int
    ) -> None:
        self._set_openmp = set_openmp
        self._set_pool = set_pool
        self._threads = threads
        self._depth = 0  # the number of nested contexts

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._set_openmp(1)
            self._set_pool(self._threads)

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._set_pool(0)
            self._set_openmp(self._threads)


class _SerialLogits(AbstractContextManager[None]):
    """Enters `serial` and sets MKL to one thread; cannot be nested in itself."""

    __slots__ = ("_before", "_serial", "_set_mkl")

    def __init__(
        self, serial: AbstractContextManager[None], set_mkl: Callable[[int], int] | None
    ) -> None:
        self._serial = serial
        self._set_mkl = set_mkl or (lambda number: 0)
        self._before = 0

    def __enter__(self) -> None:
        self._serial.__enter__()
        self._before = self._set_mkl(1)

    def __exit__(self, *exc_info: object) -> None:
        self._set_mkl(self._before)
        self._serial.__exit__(None, None, None)


def _mkl_threads_setter() -> Callable[[int], int] | None:
    """A function that sets MKL's number of threads for the calling thread.

    That function returns the number that was set before; 0 = none was set. The result is None if
    torch was built without MKL.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return getattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local", None)
    except OSError:
        return None
