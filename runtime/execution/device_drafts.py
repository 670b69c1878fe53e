"""Runs the steps of a drafter on a GPU. Its drafts stay on the device."""

from __future__ import annotations

import msgspec
import torch

from ostinato.graphs.buffers import StaticBuffers
from ostinato.runtime.execution.inline_executor import InlineExecutor
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput, StepResult

__all__ = ("DeviceDrafts",)


class DeviceDrafts:
    """Runs steps of a draft model or a head without waiting for their tokens.

    The drawn tokens are stored in the step buffers of the model that verifies them. A result has
    marks (`StaticBuffers.draft_mark`) instead of tokens. The drafter gives a mark as the input of
    its next step. There it stands for the row's last token in the drafter's own buffers.

    Args:
        executor: the drafter's executor.
        drafter: its step buffers.
        target: the step buffers of the model that verifies the drafts.
    """

    def __init__(
        self, executor: InlineExecutor, drafter: StaticBuffers, target: StaticBuffers
    ) -> None:
        self._executor = executor
        self._drafter = drafter
        self._target = target

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Queue a step. All sequences that sample draw their draft tokens at the same index."""
        place = 0
        scheduled: list[ScheduledSequence] = []
        for entry in output.scheduled:
            if entry.token_ids[-1] < 0:  # the mark of the row's previous draft token
                place = self._place_of(entry) + 1
                entry = msgspec.structs.replace(entry, token_ids=[])
            scheduled.append(entry)
        rows = [entry.row for entry in scheduled if entry.num_logits]
        step = self._executor.queue(msgspec.structs.replace(output, scheduled=scheduled))
        if step.tokens is None:
            return StepResult([])
        drawn = step.tokens.last_tokens
        assert isinstance(drawn, torch.Tensor), "steps on a GPU have their tokens there"
        self._target.store_drafts(place, self._drafter.sampled_rows(len(rows)), drawn)
        return StepResult([self._target.draft_mark(row, place) for row in rows])

    def _place_of(self, entry: ScheduledSequence) -> int:
        return self._target.draft_mark(entry.row, 0) - entry.token_ids[-1]
