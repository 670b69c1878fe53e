"""Runs the steps of a draft head; implements `DraftHead` (runtime/speculation/head_drafter.py).

The head's model, programs and sampler work like those of any model. This module adds the head's
second input: hidden states of the target, or the head's own outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ostinato.models.draft_heads.draft_head_model import DraftHeadModel
from ostinato.runtime.execution.hidden_states import KeptStates, Span
from ostinato.runtime.execution.inline_executor import InlineExecutor
from ostinato.runtime.execution.model_runner import ModelRunner
from ostinato.runtime.sampling.to_device import to_device
from ostinato.runtime.types.step import SchedulerOutput, StepResult

__all__ = ("HeadRunner",)


class HeadRunner:
    """A draft head that is attached to its target model, with its executor.

    Args:
        model: the head.
        executor: the head's executor.
        runner: the executor's runner.
        execute: runs a step of the executor; its result has the drawn tokens, or numbers that stand
            for them.
        hidden_states: the hidden states of the target's steps.
    """

    def __init__(
        self,
        model: DraftHeadModel,
        executor: InlineExecutor,
        runner: ModelRunner,
        execute: Callable[[SchedulerOutput], StepResult],
        hidden_states: KeptStates,
    ) -> None:
        self._model = model
        self._executor = executor
        self._runner = runner
        self._execute = execute
        self._states = hidden_states
        self._num_outputs = 0  # rows of `outputs` that the last step has written
        self._offsets = runner.draw_offsets = {}

    def watch(self, row: int) -> None:
        self._states.watch(row)

    def unwatch(self, row: int) -> None:
        self._states.unwatch(row)

    def span(self, row: int) -> tuple[int, int]:
        return self._states.span(row)

    @torch.inference_mode()
    def compute(self, output: SchedulerOutput, begins: Sequence[int]) -> list[int]:
        spans: list[Span] = []
        for entry, begin in zip(output.scheduled, begins, strict=True):
            spans.append(Span(entry.row, begin, begin + entry.num_new_tokens))
            # The head's input at position p is the sequence's token at p + 1.
            self._offsets[entry.row] = begin - entry.start + 1
        # Outside of this context, small operations would wait for OpenMP threads that have no core,
        # because the workers of the kernels' thread pool are still awake and use the cores.
        with self._runner.hold_threads(output.num_tokens):
            self._model.read_hidden(self._states.take(spans))
        return self._run(output)

    @torch.inference_mode()
    def extend(self, output: SchedulerOutput, kept: Sequence[int]) -> list[int]:
        with self._runner.hold_threads(output.num_tokens):
            outputs = self._model.outputs[: self._num_outputs]
            if len(kept) != len(outputs):
                outputs = outputs[to_device(kept, outputs.device)]
            self._model.read_features(outputs)
        return self._run(output)

    def idle(self) -> None:
        self._executor.idle()

    def close(self) -> None:
        self._executor.close()

    def _run(self, output: SchedulerOutput) -> list[int]:
        token_ids = self._execute(output).token_ids
        self._num_outputs = len(token_ids)
        return token_ids
