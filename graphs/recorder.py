"""Recorders capture a call over static buffers: as a CUDA graph, or as a CPU graph.

On a CPU the program records its layers itself (graphs/compiler/cpu_capture.py). The code that
decides what is recorded, and when, uses the protocol `Recorder` and is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ostinato.graphs.compiler.programs import Program

__all__ = ("CpuRecorder", "CudaRecorder", "Recorder", "is_out_of_memory")


class Recorder(Protocol):
    """Turns a call over static buffers into a replay."""

    largest_first: bool
    """Whether the largest bucket is captured first; else the smallest is."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A replay with `run`'s effects. The next replay overwrites its output tensor.

        Raises:
            RuntimeError: the call cannot be captured. If memory was short (`is_out_of_memory`),
                other calls can still be captured.
        """
        ...


class CpuRecorder:
    """Records a program's layers as CPU graphs at the first bucket.

    The sizes of these graphs are symbolic. So one recording serves all buckets, and every other
    step that is small enough. A replay is the call itself, with its arguments bound. The call that
    is recorded also computes its step. So the smallest bucket is captured first.
    """

    largest_first = False

    def __init__(self, program: Program | None) -> None:
        """
        Args:
            program: what the captured calls run; None = the eager model, of which nothing can be
                recorded.
        """
        self._program = program

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self._program is not None and self._program.wants_capture:
            with self._program.recording():
                run()
        return run


class _Pool:
    """The memory that graphs share and the stream they are captured on."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


class CudaRecorder:
    """CUDA graphs in one memory pool.

    The largest bucket is captured first, so that the others fit into its memory. All graphs write
    their result into one tensor: with a tensor for each, the logits of large vocabularies would add
    up to gigabytes.
    """

    largest_first = True

    def __init__(self, output: Tensor | None = None, *, pool: _Pool | None = None) -> None:
        """
        Args:
            output: takes the results; has rows for the largest result. None = the recorder
                allocates it.
            pool: another recorder's memory, see `sharing_pool`.
        """
        self._pool = pool or _Pool()
        self._output = output

    def sharing_pool(self, output: Tensor | None = None) -> CudaRecorder:
        """A recorder for other results whose graphs use the same memory.

        Sharing is safe: results are copied out of the pool, and graphs run one after another.
        """
        return CudaRecorder(output, pool=self._pool)

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Two runs on the side stream load all kernels: loading is not allowed during a capture.
        stream = self._pool.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            example = run()
        torch.cuda.current_stream().wait_stream(stream)
        output = self._output_like(example)
        del example
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool.handle, stream=stream):
                output.copy_(run())
        except RuntimeError:
            del graph
            torch.cuda.empty_cache()  # frees the memory of the unfinished graph
            raise

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _output_like(self, example: Tensor) -> Tensor:
        """The first rows of the output tensor, which is replaced when it has too few."""
        if self._output is None or len(self._output) < len(example):
            self._output = torch.empty_like(example)
        return self._output[: len(example)]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one of those that led to it, is a failed allocation.

    A capture that ran out of memory raises a second, different error when it is closed.
    """
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            words in text for words in ("out of memory", "can't allocate memory")
        ):
            return True
        error = error.__context__
    return False
