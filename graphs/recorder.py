"""Turning a call over static tensors into something cheap to repeat: the border to CUDA graphs.

On CUDA a recorded call is a graph. On a CPU no graph API exists, and a recorded call is the call
with its arguments bound. Everything that decides what is recorded and when is on this side of
`Recorder`, and is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ("BoundRecorder", "CudaRecorder", "Recorder", "is_out_of_memory")


class Recorder(Protocol):
    """Turns a call over static buffers into something cheap to repeat."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns a replay with `run`'s effects; its output tensor is overwritten by the next
        replay.

        Raises:
            RuntimeError: it can not be captured. After a lack of memory (`is_out_of_memory`) other
                calls still can.
        """
        ...


class BoundRecorder:
    """The CPU's form: the call itself, its arguments already sliced."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return run


class _Pool:
    """The memory that graphs share and the stream they are captured on."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


class CudaRecorder:
    """CUDA graphs in one memory pool; capture the largest bucket first so that the others fit in
    it. All graphs put their result into the same tensor: each would keep one of its own otherwise,
    and logits of large vocabularies add up to gigabytes.
    """

    def __init__(self, output: Tensor | None = None, *, pool: _Pool | None = None) -> None:
        """
        Args:
            output: where results go, with rows for the largest; None = a tensor of our own.
            pool: of another recorder, see `sharing_pool`.
        """
        self._pool = pool or _Pool()
        self._output = output

    def sharing_pool(self, output: Tensor | None = None) -> CudaRecorder:
        """A recorder for other results whose graphs use the same memory.

        Results are copied out of the pool and graphs run one after another, so none needs what
        another left there.
        """
        return CudaRecorder(output, pool=self._pool)

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Two runs on the side stream: kernels load lazily, and loading is not allowed while
        # capturing.
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
            torch.cuda.empty_cache()  # what the unfinished graph held
            raise

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _output_like(self, example: Tensor) -> Tensor:
        """The first rows of the tensor that graphs write to; a larger one when they are too few."""
        if self._output is None or len(self._output) < len(example):
            self._output = torch.empty_like(example)
        return self._output[: len(example)]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, now or before: a capture that lacked memory raises again when
    it is closed.
    """
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            words in text for words in ("out of memory", "can't allocate memory")
        ):
            return True
        error = error.__context__
    return False
