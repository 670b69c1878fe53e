"""Running a step: captured program, compiled program or eager model, chosen by a table.

On CUDA a captured bucket is a CUDA graph over the static buffers. On a CPU it is the program with
its arguments bound once (no graph API exists there, and the binding is what is left to save). Both
are behind `Recorder`, so bucket choice, padding and replay are tested without a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from ostinato.graphs.buckets import BucketTable, GraphKey
from ostinato.graphs.buffers import StaticBuffers, StepBatch
from ostinato.graphs.compile import Program
from ostinato.models.base import CausalLM, KVCache
from ostinato.ops.attention import AttentionPlanner

__all__ = ("BoundRecorder", "CudaRecorder", "GraphRunner", "Recorder", "StepKind")


class StepKind(StrEnum):
    """How a step ran."""

    captured = "captured"
    compiled = "compiled"
    eager = "eager"


class Recorder(Protocol):
    """Turns a call over static buffers into something cheap to repeat."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns a replay with `run`'s effects; its output tensor is overwritten by the next
        replay.
        """
        ...


class BoundRecorder:
    """The CPU's form: the call itself, its arguments already sliced."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return run


class CudaRecorder:
    """CUDA graphs in one memory pool; capture the largest bucket first so that the others fit in
    it. All graphs put their result into the same tensor: each would keep one of its own otherwise,
    and logits of large vocabularies add up to gigabytes.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._output: Tensor | None = None

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Two runs on the side stream: kernels load lazily, and loading is not allowed while
        # capturing.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            example = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        output = self._output_like(example)
        del example
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output.copy_(run())

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _output_like(self, example: Tensor) -> Tensor:
        """The first rows of the tensor that graphs write to; a larger one when they are too few."""
        if self._output is None or len(self._output) < len(example):
            self._output = torch.empty_like(example)
        return self._output[: len(example)]


class GraphRunner:
    """Owns the programs of an engine and picks one per step."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        buffers: StaticBuffers,
        *,
        program: Program | None = None,
        table: BucketTable | None = None,
        recorder: Recorder | None = None,
        planner: AttentionPlanner | None = None,
    ) -> None:
        """
        Args:
            model: the eager model; makes the logits in every form.
            kv_cache: written by every step.
            buffers: where every step's inputs are.
            program: the compiled form; None = eager.
            table: the buckets to capture; None = capture nothing.
            recorder: how to capture; needed with a table.
            planner: host planning of the attention backend; None when it needs none.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._buffers = buffers
        self._program = program
        self._table = table
        self._recorder = recorder
        self._planner = planner
        self._replays: dict[GraphKey, Callable[[], Tensor]] = {}
        self.steps_by_kind: dict[str, int] = {kind.value: 0 for kind in StepKind}

    @property
    def captured_keys(self) -> list[GraphKey]:
        return list(self._replays)

    def capture(self, progress: Callable[[GraphKey], None] = lambda key: None) -> None:
        """Capture every bucket of the table, largest first; writes to the null block only."""
        if self._table is None or self._recorder is None:
            return
        gc.collect()
        gc.disable()  # a collection that frees device memory would break a capture
        try:
            for key in self._table.keys:
                self._buffers.wait_for_upload()
                self._fill_with_padding(key)
                self._replays[key] = self._recorder.capture(self._bind(key))
                progress(key)
        finally:
            gc.enable()

    def warm_up(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Run the uncaptured program once at each (num_tokens, num_seqs), so that nothing is lazy
        later.
        """
        for num_tokens, num_seqs in shapes:
            key = GraphKey(num_tokens, num_seqs, False)
            self._buffers.wait_for_upload()
            self._fill_with_padding(key)
            self._plan(key)
            self._forward(self._buffers.batch(num_tokens, num_seqs, num_seqs), uniform=False)

    def run(
        self, num_tokens: int, num_seqs: int, num_logits: int, *, uniform_decode: bool
    ) -> Tensor:
        """Run the step whose inputs are in the host buffers.

        Args:
            num_tokens: real tokens T.
            num_seqs: real sequences S.
            num_logits: rows of `logits_indices` in use.
            uniform_decode: one token per sequence, every one sampled, in sequence order.

        Returns:
            [num_logits, vocab_size] float32 logits, valid until the next run.
        """
        key = None
        if self._table is not None and self._replays:
            key = self._table.round_up(num_tokens, num_seqs, uniform_decode=uniform_decode)
        replay = self._replays.get(key) if key is not None else None
        if key is not None and replay is not None:
            self._buffers.pad(num_tokens, num_seqs, key)
            self._buffers.host.logits_indices[num_logits : key.num_seqs] = 0
            self._buffers.upload(key.num_seqs)
            self._plan(key)
            self.steps_by_kind[StepKind.captured] += 1
            return replay()[:num_logits]
        self._buffers.upload(num_seqs)
        self._plan(GraphKey(num_tokens, num_seqs, uniform_decode))
        kind = StepKind.eager if self._program is None else StepKind.compiled
        self.steps_by_kind[kind] += 1
        batch = self._buffers.batch(num_tokens, num_seqs, num_logits)
        return self._forward(batch, uniform=uniform_decode)

    def _forward(self, batch: StepBatch, *, uniform: bool) -> Tensor:
        forward = self._model if self._program is None else self._program
        hidden = forward(batch.forward, self._kv_cache)
        # With one token per sequence the rows are already the ones to sample.
        return self._model.compute_logits(hidden if uniform else hidden[batch.logits_indices])

    def _bind(self, key: GraphKey) -> Callable[[], Tensor]:
        batch = self._buffers.batch(key.num_tokens, key.num_seqs, key.num_seqs)
        self._plan(key)
        return lambda: self._forward(batch, uniform=key.uniform_decode)

    def _plan(self, key: GraphKey) -> None:
        if self._planner is not None:
            self._planner.plan(key, self._buffers.host, self._buffers.plan)

    def _fill_with_padding(self, key: GraphKey) -> None:
        self._buffers.host.query_start_loc[0] = 0
        self._buffers.pad(0, 0, key)
        self._buffers.upload(key.num_seqs)
