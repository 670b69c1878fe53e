"""How many CPU threads a step's small loops get.

A parallel loop ends in a barrier that costs microseconds on an idle machine and a scheduler's time
slice on a busy one, and a decode step has several such loops per layer with next to nothing to do.
So the compiled graph's own loops run on one thread in small steps; the matrix and attention kernels
choose their threads themselves (ops/native).
"""

from __future__ import annotations

import ctypes

__all__ = ("StepThreads",)

# Up to this many tokens a layer's element-wise work (some 10,000 numbers) is worth no barrier.
_SERIAL_TOKENS = 16


class StepThreads:
    """Switches OpenMP's number of threads around a step.

    Args:
        threads: what steps above the limit, and everything outside of steps, use.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # The OpenMP runtime that torch has loaded; a torch without OpenMP has nothing to switch.
        self._set = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)

    def begin(self, num_tokens: int) -> None:
        """Call before a step."""
        if num_tokens <= _SERIAL_TOKENS and self._set is not None:
            self._set(1)

    def end(self, num_tokens: int) -> None:
        """Call after it."""
        if num_tokens <= _SERIAL_TOKENS and self._set is not None:
            self._set(self._threads)
