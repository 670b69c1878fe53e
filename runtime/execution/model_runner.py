"""Runs one rank's steps: builds the batch, runs the model's graph, samples."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.capture import GraphRunner, RunStep
from ostinato.graphs.threads import StepThreads
from ostinato.ops.parallel.divided_draws import answer_rank_0
from ostinato.runtime.execution.batch_builder import BatchBuilder, StepShape, tokens_per_seq
from ostinato.runtime.execution.hidden_states import KeptStates
from ostinato.runtime.execution.pooler import PendingVectors, Pooler
from ostinato.runtime.execution.prompt_logprobs import PromptScorer
from ostinato.runtime.sampling.grammar_masks import MASKS_S
from ostinato.runtime.sampling.pending_tokens import (
    PendingTokens,
    PendingVerification,
    VerifiedTokens,
)
from ostinato.runtime.sampling.row_state import RowState
from ostinato.runtime.sampling.sampler import Sampler
from ostinato.runtime.types.outputs import TokenLogprobs
from ostinato.runtime.types.step import SchedulerOutput, StepResult

if TYPE_CHECKING:
    from ostinato.runtime.execution.encoding.audio_tensor_writer import AudioTensorWriter
    from ostinato.runtime.execution.encoding.media_tensor_writer import MediaTensorWriter

__all__ = ("ModelRunner", "PendingStep")


# Rows of logits that are computed at once for prompt log-probabilities. More rows would take more
# memory than sampling; fewer rows would take longer.
_SCORED_ROWS = 16
_MAX_MASKS_S = 0.05  # the most seconds for grammar masks in a step, also if the model takes long


class PendingStep:
    """A launched step whose result has not been read."""

    __slots__ = ("launched_at", "logits", "prompt_logprobs", "tokens", "vectors")

    def __init__(
        self,
        launched_at: float,
        prompt_logprobs: list[list[TokenLogprobs]] | None,
        vectors: PendingVectors | None,
    ) -> None:
        self.launched_at = launched_at  # seconds, time.perf_counter()
        self.prompt_logprobs = prompt_logprobs
        self.vectors = vectors  # None = no prompt is pooled
        # None = no sequence samples
        self.tokens: PendingTokens | PendingVerification | VerifiedTokens | None = None
        self.logits: Tensor | None = None  # set while sampling waits for the previous step


class ModelRunner:
    """Runs steps on one device.

    `model_seconds` is summed over steps. For each step it counts from the time when the inputs are
    ready until the tokens are on the host. The caller's work between `launch` and `read` is left
    out.
    """

    def __init__(
        self,
        graphs: GraphRunner,
        buffers: StaticBuffers,
        sampler: Sampler | None,
        threads: StepThreads | None = None,
        pooler: Pooler | None = None,
        hidden_states: KeptStates | None = None,
        logits_group: Tensor | None = None,
        encoder_tensors: MediaTensorWriter | AudioTensorWriter | None = None,
    ) -> None:
        """
        Args:
            graphs: runs the model's programs.
            buffers: the static buffers that `graphs` reads.
            sampler: samples the tokens; None = another rank has the sampler.
            threads: switches the CPU thread pools around a step; None = no switching.
            pooler: makes vectors; None = a pooler for a model without a classification head.
            hidden_states: gets the states of each step from `graphs.aux`; None = none are kept.
            logits_group: the model's `LanguageModel.logits_group`. Without a sampler, this rank
                helps rank 0 to draw through it.
            encoder_tensors: writes the step tensors of a model that takes images or audio; None =
                it takes text only.
        """
        # row -> a number that is added to the row's positions before random numbers are drawn for
        # them. None = nothing is added. Only a draft head (runtime/execution/draft_head.py) sets
        # it. A head's positions count from the first block that it computed, and its drafts need
        # the random numbers of the same positions in the sequence.
        self.draw_offsets: dict[int, int] | None = None
        self.hidden_states = hidden_states
        self.graphs = graphs
        self._threads = threads
        self._sampler = sampler
        self._logits_group = logits_group if sampler is None else None
        self._buffers = buffers
        self._batch = BatchBuilder(buffers)
        self._encoder_tensors = encoder_tensors
        self._scorer = PromptScorer(
            graphs.compute_logits,
            max_rows=min(_SCORED_ROWS, buffers.host.block_table.shape[0]),
            hold_threads=self._hold_for_logits,
        )
        self._pooler = pooler or Pooler()
        states: tuple[RowState | None, ...] = (
            self._batch,
            self._sampler,
            self._scorer,
            self._pooler,
            encoder_tensors,
        )
        self._row_states = [state for state in states if state is not None]
        self._undrawn: PendingStep | None = None  # the last launched step, if its sampling waits
        self._device_seconds_before: dict[str, float] = {}
        self.model_seconds = 0.0

    @property
    def grammar_seconds(self) -> float:
        """Seconds spent on the masks of grammars."""
        return 0.0 if self._sampler is None else self._sampler.grammars.seconds

    @property
    def device_seconds_by_kind(self) -> dict[str, float]:
        """Seconds of finished steps by kind: on the device's clock, or on the host's for a CPU."""
        before = self._device_seconds_before
        sums = self.graphs.timer.seconds_by_kind
        return {str(kind): seconds - before.get(kind, 0.0) for kind, seconds in sums.items()}

    def last_tokens(self, rows: list[int]) -> list[int]:
        """The last token of each of these rows. All launched steps must have been read."""
        if self._buffers.async_tokens:  # the host's copy is not kept up to date
            return self._buffers.last_tokens.cpu()[rows].tolist() if rows else []
        return self._batch.last_token[rows].tolist()

    @torch.inference_mode()
    def set_last_tokens(self, rows: list[int], token_ids: list[int]) -> None:
        """Set the last tokens of rows. Another rank has sampled these tokens."""
        if self._buffers.async_tokens:
            last = self._buffers.last_tokens
            last[torch.tensor(rows, dtype=torch.int64, device=last.device)] = torch.tensor(
                token_ids, dtype=torch.int64, device=last.device
            )
        else:
            self._batch.last_token[rows] = token_ids

    def foresee(self, output: SchedulerOutput) -> RunStep:
        """The kind of program that will run a step, and the step's sizes with padding."""
        num_rows = sum(entry.num_logits for entry in output.scheduled)
        per_seq = int(output.num_tokens == output.num_seqs == num_rows)
        if output.num_drafts:
            per_seq = tokens_per_seq(output.scheduled)
        return self.graphs.foresee(
            output.num_tokens,
            output.num_seqs,
            num_rows,
            tokens_per_seq=per_seq,
            with_hidden=output.num_prompt_logits > 0 or output.num_pooled > 0,
        )

    def reset_counters(self) -> None:
        """Reset the counters, after steps that served no request."""
        self.model_seconds = 0.0
        self._device_seconds_before = dict(self.graphs.timer.seconds_by_kind)
        self.graphs.steps_by_kind = dict.fromkeys(self.graphs.steps_by_kind, 0)
        self.graphs.num_padding_tokens = 0

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Start a step. The next step may be launched before this step is read.

        The next step reads this step's tokens on the device. If rows of the next step have
        grammars, its sampling waits until this step has been read.
        """
        for admitted in output.admitted:
            for state in self._row_states:
                state.admit(admitted.row, admitted.request, admitted.output_token_ids)
        if output.block_copies:
            self.graphs.copy_blocks(output.block_copies)
        step = self._batch.build(output)
        if self._encoder_tensors is not None:
            self._encoder_tensors.write(output)
        begin = time.perf_counter()
        with self.hold_threads(step.num_tokens, pools=output.num_pooled > 0):
            pending = self._launch(output, step)
        self.graphs.timer.end()
        self.model_seconds += time.perf_counter() - begin
        return pending

    def _launch(self, output: SchedulerOutput, step: StepShape) -> PendingStep:
        begin = time.perf_counter()
        sampler = self._sampler
        if step.sampled_rows and sampler is not None:
            positions = step.sampled_positions
            if (offsets := self.draw_offsets) is not None:
                rows = zip(step.sampled_rows, positions, strict=True)
                positions = [position + offsets.get(row, 0) for row, position in rows]
            sampler.stage(step.sampled_rows, positions, step.drafts)
        prompt_logprobs, vectors = None, None
        if output.num_prompt_logits or output.num_pooled:
            logits, hidden = self.graphs.run_with_hidden(
                step.num_tokens,
                step.num_seqs,
                len(step.sampled_rows),
                has_adapters=step.has_adapters,
            )
            is_last = self.graphs.is_last_stage
            if output.num_prompt_logits and is_last:
                prompt_logprobs = self._scorer.score(hidden, output.scheduled)
            if output.num_pooled and is_last:
                vectors = self._pooler.pool(hidden, output.scheduled)
        else:
            logits = self.graphs.run(
                step.num_tokens,
                step.num_seqs,
                len(step.sampled_rows),
                tokens_per_seq=step.tokens_per_seq,
                has_adapters=step.has_adapters,
            )
        if self.hidden_states is not None:
            assert self.graphs.aux is not None, "hidden states are kept only if graphs write them"
            self.hidden_states.store(output.scheduled, self.graphs.aux.states)
        pending = PendingStep(begin, prompt_logprobs, vectors)
        if step.sampled_rows and self._logits_group is not None:
            assert logits is not None, "rows that sample have logits"
            answer_rank_0(logits, self._logits_group)
        if step.sampled_rows and sampler is not None:
            assert logits is not None, "rows that sample have logits"
            if sampler.waits_for_tokens:
                pending.logits = logits
                self._undrawn = pending
            else:
                # Grammars compute masks of allowed tokens within this time limit. A row whose mask
                # is not ready gets no token in this step. The limit grows with the model's time: if
                # the model took long, further milliseconds hardly lengthen the step.
                seconds = time.perf_counter() - begin
                masks_s = min(max(MASKS_S, seconds / 2), _MAX_MASKS_S)
                self._draw(sampler, pending, logits, seconds, masks_s)
        return pending

    def read(self, pending: PendingStep) -> StepResult:
        """Wait for a launched step and return its tokens, in the order of its sampling rows.

        Steps are read in the order in which they were launched. If the sampling of the next step
        waits for these tokens, it starts here.
        """
        begin = time.perf_counter()
        result = StepResult([]) if pending.tokens is None else pending.tokens.read()
        result.prompt_logprobs = pending.prompt_logprobs
        if pending.vectors is not None:
            result.pooled = pending.vectors.read()
        undrawn, self._undrawn = self._undrawn, None
        if undrawn is not None and undrawn.logits is not None and self._sampler is not None:
            with torch.inference_mode(), self.hold_threads(0):
                seconds = time.perf_counter() - undrawn.launched_at
                self._draw(self._sampler, undrawn, undrawn.logits, seconds)
            undrawn.logits = None
        self.model_seconds += time.perf_counter() - begin
        return result

    def _draw(
        self,
        sampler: Sampler,
        pending: PendingStep,
        logits: Tensor,
        model_s: float,
        masks_s: float = MASKS_S,
    ) -> None:
        # The sampling op uses no threads of OpenMP or MKL. The operations of torch that compute the
        # reported log-probabilities do.
        reports = sampler.reports_logprobs
        following = None
        if sampler.has_drafts and logits.device.type == "cuda":
            following = self._buffers.following_tokens(len(logits))
        with self._hold_for_logits(logits.numel()) if reports else nullcontext():
            pending.tokens = sampler.launch(logits, masks_s, model_s, following)
        self._buffers.store_last_tokens(pending.tokens.last_tokens)

    def hold_threads(self, num_tokens: int, *, pools: bool = False) -> AbstractContextManager[None]:
        """A context that sets the numbers of CPU threads for a step or a part of it."""
        has_loops = self.graphs.has_loops
        # Compiled loops divide a pooled sum of hidden states among the threads, and another number
        # of threads rounds the sum differently. `StepThreads` chooses the number by the size of the
        # step. So `StepThreads` is not used for steps that pool: their number of threads is fixed.
        if self._threads is None or (pools and has_loops):
            return nullcontext()
        return self._threads.for_step(num_tokens, has_loops=has_loops)

    def _hold_for_logits(self, num_numbers: int) -> AbstractContextManager[None]:
        return nullcontext() if self._threads is None else self._threads.for_logits(num_numbers)
