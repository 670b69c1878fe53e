"""Executes what the scheduler decided: build the batch, run the graph, sample. Knows no request
queue.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.capture import GraphRunner
from ostinato.graphs.threads import StepThreads
from ostinato.runtime.batch import BatchBuilder, StepShape
from ostinato.runtime.sampler import Sampler
from ostinato.runtime.types import SchedulerOutput, StepResult

__all__ = ("ModelRunner",)


class ModelRunner:
    """One device's executor of steps.

    `model_seconds` sums the time between a step's inputs being ready and its tokens being on the
    host.
    """

    def __init__(
        self,
        graphs: GraphRunner,
        buffers: StaticBuffers,
        sampler: Sampler,
        threads: StepThreads | None = None,
    ) -> None:
        """
        Args:
            graphs: the programs.
            buffers: those that `graphs` reads.
            sampler: picks the tokens.
            threads: switches CPU threads around a step; None = leave them alone.
        """
        self.graphs = graphs
        self._threads = threads
        self._sampler = sampler
        self._batch = BatchBuilder(buffers)
        self.model_seconds = 0.0

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step and return the sampled tokens, in the order of its sampling rows."""
        for admitted in output.admitted:
            self._batch.admit(admitted.row)
            self._sampler.admit(admitted.row, admitted.request, admitted.output_token_ids)
        step = self._batch.build(output)
        begin = time.perf_counter()
        logits = self._run(step)
        result = StepResult([])
        if step.sampled_rows:
            result = self._sampler.sample(logits, step.sampled_rows, step.sampled_positions)
            self._batch.last_token[step.sampled_rows] = result.token_ids
        self.model_seconds += time.perf_counter() - begin
        return result

    def _run(self, step: StepShape) -> Tensor:
        if self._threads is not None:
            self._threads.begin(step.num_tokens)
        try:
            return self.graphs.run(
                step.num_tokens,
                step.num_seqs,
                len(step.sampled_rows),
                uniform_decode=step.uniform_decode,
            )
        finally:
            if self._threads is not None:
                self._threads.end(step.num_tokens)
