"""Runs each step as a captured program, as the compiled program or as the eager model.

A step that fits a bucket of the table runs the program that was captured for this bucket. Other
steps run the compiled program, or the eager model if there is no compiled program. A `Recorder`
captures the program of a bucket: as a CUDA graph over the static buffers, or on a CPU as the
program with its arguments bound. A bucket whose capture runs out of memory is left out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.graphs.buckets import BucketTable, GraphKey
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.compiler.programs import LayerProgram, Program
from ostinato.graphs.recorder import Recorder, is_out_of_memory
from ostinato.graphs.timing import ClockTimer, StepTimer
from ostinato.models.base import AuxStates, CausalLM, LanguageModel
from ostinato.models.kv_cache import KVCache
from ostinato.models.step_tensors import ForwardBatch, StepSizes
from ostinato.ops.attention import AttentionPlanner

__all__ = ("GraphRunner", "RunStep", "StageBorder", "StepKind")


class StepKind(StrEnum):
    """How a step ran."""

    captured = "captured"
    compiled = "compiled"
    eager = "eager"


class RunStep(NamedTuple):
    """The kind of a step that was run, and its shape."""

    kind: StepKind
    num_tokens: int  # padding included
    num_seqs: int


class StageBorder(Protocol):
    """Moves hidden states between this stage of a pipeline and its neighbours.

    The programs that are compiled and captured do not include these moves.
    """

    def arrive(self, num_tokens: int) -> None:
        """Start to bring the input of a step of `num_tokens`, padding included, to the device."""
        ...

    def leave(self, num_tokens: int) -> None:
        """Pass on the output of a launched step of `num_tokens`, padding included."""
        ...


class GraphRunner:
    """The programs of an engine; each step runs one of them."""

    def __init__(  # noqa: PLR0913 - the parts of an engine's steps
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        buffers: StaticBuffers,
        *,
        program: Program | None = None,
        table: BucketTable | None = None,
        recorder: Recorder | None = None,
        planner: AttentionPlanner | None = None,
        timer: StepTimer | None = None,
        aux: AuxStates | None = None,
        border: StageBorder | None = None,
    ) -> None:
        """
        Args:
            model: the eager model. Its output head computes the logits for compiled programs, too.
            kv_cache: every step writes it.
            buffers: the inputs of every step.
            program: the compiled model; None = steps run eagerly.
            table: the buckets to capture; None = nothing is captured.
            recorder: captures the buckets; required with a table.
            planner: plans steps on the host for the attention backend; None if it needs no plans.
            timer: measures device time; None = the clock measures it.
            aux: gets hidden states of every step for a head that drafts; None = they are not kept.
            border: called before and after each step; None = the model exchanges hidden states
                itself, or is not divided into stages.
        """
        self.aux = aux
        self._border = border
        self._model = model
        self._has_logits = isinstance(model, CausalLM) and model.stage.is_last
        self.is_last_stage = model.stage.is_last
        self._kv_cache = kv_cache
        self._buffers = buffers
        self._program = program
        self._table = table
        self._recorder = recorder
        self._planner = planner
        self.timer = timer or ClockTimer()
        self._replays: dict[GraphKey, Callable[[], Tensor]] = {}
        # Hidden states of captured steps on a GPU, outside of the graphs' memory, which the next
        # replay overwrites. They have the size of the largest bucket.
        self._kept_states: list[Tensor] = []
        self.steps_by_kind: dict[str, int] = {kind.value: 0 for kind in StepKind}
        self.num_padding_tokens = 0  # computed only because a bucket is larger than its step
        self.last_step = RunStep(StepKind.eager, 0, 0)

    @property
    def has_loops(self) -> bool:
        """Whether a step may contain parallel loops besides those of our own kernels."""
        return self._program is None or self._program.has_loops

    @property
    def layers_by_program(self) -> dict[str, int]:
        """How a layer runs in a small step (`LayerProgram`) -> number of such layers."""
        counts = dict.fromkeys(map(str, LayerProgram), 0)
        if self._program is None:
            counts[LayerProgram.eager] = len(self._model.layers)
        elif self._replays and self._kv_cache[0][0].device.type == "cuda":
            counts[LayerProgram.captured] = len(self._model.layers)
        else:
            counts |= {str(way): count for way, count in self._program.layers_by_program.items()}
        return counts

    @property
    def captured_keys(self) -> list[GraphKey]:
        """The captured buckets. Those with adapters have the same shapes and are not listed."""
        return [key for key in self._replays if not key.has_adapters]

    @property
    def num_captured(self) -> int:
        """The number of captured programs, those with adapters included."""
        return len(self._replays)

    def capture(
        self,
        progress: Callable[[GraphKey], None] = lambda key: None,
        *,
        must_fit: bool = False,
    ) -> list[GraphKey]:
        """Capture every bucket of the table; writes to the null block only.

        Args:
            progress: called after each captured bucket.
            must_fit: raise the error of a capture that runs out of memory, because other ranks
                capture the same buckets at the same time.

        Returns:
            The buckets whose capture ran out of memory. The next larger bucket serves their steps,
            or the uncaptured program.

        Raises:
            RuntimeError, MemoryError: a capture failed for another reason, or with `must_fit` for
                any reason.
        """
        left_out: list[GraphKey] = []
        if self._table is None or self._recorder is None:
            return left_out
        gc.collect()
        gc.disable()  # a garbage collection that frees device memory would break a capture
        try:
            keys = self._table.keys
            for key in keys if self._recorder.largest_first else reversed(keys):
                self._buffers.wait_for_upload()
                self._fill_with_padding(key)
                try:
                    for one in self._variants(key):
                        self._replays[one] = self._recorder.capture(self._bind(one))
                except (MemoryError, RuntimeError) as error:
                    if must_fit or not is_out_of_memory(error):
                        raise
                    self._drop(key)
                    left_out.append(key)
                    continue
                progress(key)
        finally:
            gc.enable()
        self._table = self._table.without(left_out)
        return left_out

    def plan_buckets(self) -> None:
        """Plan each bucket once, so that the planner allocates the memory of each bucket."""
        for key in [] if self._table is None else self._table.keys:
            self._buffers.wait_for_upload()
            self._fill_with_padding(key)
            self._plan(key)

    def warm_up(self, shapes: Iterable[StepSizes]) -> None:
        """Run the uncaptured program once at each shape.

        Kernels that are loaded or tuned at their first use are then ready.
        """
        for shape in shapes:
            key = GraphKey(shape.num_tokens, shape.num_seqs, 0)
            self._buffers.wait_for_upload()
            self._buffers.host.logits_indices[: shape.num_rows] = 0
            self._fill_with_padding(key)
            self._plan(key)
            for one in self._variants(key):
                self._result(self._buffers.batch(*shape, has_adapters=one.has_adapters))

    def drop_decode_buckets(self, sizes: Collection[int]) -> None:
        """Remove the decode buckets of these sizes; the next larger ones serve their steps."""
        if self._table is None:
            return
        keys = [GraphKey(size, size, 1) for size in sizes]
        for key in keys:
            self._drop(key)
        self._table = self._table.without(keys)

    def run(
        self,
        num_tokens: int,
        num_seqs: int,
        num_rows: int,
        *,
        tokens_per_seq: int,
        has_adapters: bool = False,
    ) -> Tensor:
        """Run the step whose inputs are in the host buffers.

        Begins the timer's step after the upload has started. The caller ends it.

        Args:
            num_tokens: real tokens T.
            num_seqs: real sequences S.
            num_rows: entries of `logits_indices` in use, R.
            tokens_per_seq: the number of tokens of each sequence, if it is the same for all and the
                logits of all tokens are wanted, in their order; else 0.
            has_adapters: whether a token has a low-rank adapter.

        Returns:
            [num_rows, vocab_size] float32 logits, valid until the next run, or with a
            `LanguageModel.logits_group` the columns of this rank. An encoder gives hidden
            states instead. A stage before the last one gives no rows.
        """
        key = self._bucket(num_tokens, num_seqs, num_rows, tokens_per_seq)
        if key is not None and has_adapters:
            key = key._replace(has_adapters=True)
        replay = self._replays.get(key) if key is not None else None
        if key is not None and replay is not None:
            self._buffers.pad(num_tokens, num_seqs, num_rows, key)
            self._buffers.upload(key.num_seqs)
            self._buffers.scatter_known_tokens(num_tokens)
            self._plan(key)
            self.num_padding_tokens += key.num_tokens - num_tokens
            self._begin(StepKind.captured, key.num_tokens, key.num_seqs)
            logits = replay()
            if self.aux is not None and self._kept_states:
                self.aux.states = [kept[: key.num_tokens] for kept in self._kept_states]
            self._leave(key.num_tokens)
            return logits if key.num_rows == num_rows else logits[:num_rows]
        if num_rows == 0:
            # Programs are traced for at least one row; its result is dropped.
            self._buffers.host.logits_indices[0] = 0
        self._buffers.upload(num_seqs)
        self._buffers.scatter_known_tokens(num_tokens)
        self._plan(GraphKey(num_tokens, num_seqs, tokens_per_seq))
        batch = self._buffers.batch(
            num_tokens, num_seqs, max(num_rows, 1), has_adapters=has_adapters
        )
        self._begin(self._uncaptured, num_tokens, num_seqs)
        result = self._result(batch, num_rows)
        self._leave(num_tokens)
        return result

    def foresee(
        self,
        num_tokens: int,
        num_seqs: int,
        num_rows: int,
        *,
        tokens_per_seq: int,
        with_hidden: bool,
    ) -> RunStep:
        """How `run`, or `run_with_hidden`, would run a step of these sizes."""
        key = None
        if not with_hidden:
            key = self._bucket(num_tokens, num_seqs, num_rows, tokens_per_seq)
        if key is None or key not in self._replays:
            return RunStep(self._uncaptured, num_tokens, num_seqs)
        return RunStep(StepKind.captured, key.num_tokens, key.num_seqs)

    def _bucket(
        self, num_tokens: int, num_seqs: int, num_rows: int, tokens_per_seq: int
    ) -> GraphKey | None:
        if self._table is None or not self._replays:
            return None
        return self._table.round_up(num_tokens, num_seqs, num_rows, tokens_per_seq=tokens_per_seq)

    def run_with_hidden(
        self, num_tokens: int, num_seqs: int, num_rows: int, *, has_adapters: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """Like `run`, but never captured; returns the final hidden states too: (logits, [T, D]).

        Logits are None if `num_rows` is 0, for an encoder, and in a stage before the last one.
        """
        self._buffers.upload(num_seqs)
        self._buffers.scatter_known_tokens(num_tokens)
        self._plan(GraphKey(num_tokens, num_seqs, 0))
        sampled = self._buffers.batch(num_tokens, num_seqs, num_rows).logits_indices
        batch = self._buffers.batch(num_tokens, num_seqs, None, has_adapters=has_adapters)
        self._begin(self._uncaptured, num_tokens, num_seqs)
        hidden = self._hidden(batch)
        self._leave(num_tokens)
        has_logits = self._has_logits and num_rows > 0
        return (self._step_logits(hidden[sampled]) if has_logits else None), hidden

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of the pool, (from, to): all are read before any is written."""
        device = self._kv_cache[0][0].device
        sources, targets = torch.tensor(copies, device=device).unbind(1)
        for page in self._kv_cache.pages:
            contents = page.view(torch.uint8)  # not every dtype can be indexed
            contents[targets] = contents[sources]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, D] hidden states -> [R, vocab_size] float32 logits, on every rank."""
        assert isinstance(self._model, CausalLM), "an encoder has no logits"
        return self._model.compute_logits(hidden)

    def _step_logits(self, hidden: Tensor) -> Tensor:
        assert isinstance(self._model, CausalLM), "an encoder has no logits"
        return self._model.step_logits(hidden)

    def close(self) -> None:
        """Free the captured programs, then the planner's buffers; no step may run afterwards."""
        self._replays.clear()
        if self._planner is not None:
            self._planner.close()

    @property
    def _uncaptured(self) -> StepKind:
        return StepKind.eager if self._program is None else StepKind.compiled

    def _begin(self, kind: StepKind, num_tokens: int, num_seqs: int) -> None:
        """Count a step and begin to time it, right before its program starts."""
        if self._border is not None:
            self._border.arrive(num_tokens)
        self.steps_by_kind[kind] += 1
        self.last_step = RunStep(kind, num_tokens, num_seqs)
        self.timer.begin(kind)

    def _leave(self, num_tokens: int) -> None:
        if self._border is not None:
            self._border.leave(num_tokens)

    def _hidden(self, batch: ForwardBatch) -> Tensor:
        forward = self._model if self._program is None else self._program
        if self.aux is None:
            return forward(batch, self._kv_cache)
        self.aux.begin()
        if not self.aux.has_final:
            return forward(batch, self._kv_cache, self.aux)
        hidden = forward(self._buffers.with_all_rows(batch), self._kv_cache)
        self.aux.states = [hidden]
        return F.embedding(batch.logits_indices, hidden)

    def _result(self, batch: ForwardBatch, num_rows: int | None = None) -> Tensor:
        """Logits of the batch's first `num_rows` rows; hidden states where there is no head.

        A stage before the last one has handed its hidden states on, so no row of them is kept.
        """
        hidden = self._hidden(batch)
        if not self.is_last_stage:
            return hidden[:0]
        if num_rows is not None:
            hidden = hidden[:num_rows]
        return self._step_logits(hidden) if self._has_logits else hidden

    def _bind(self, key: GraphKey) -> Callable[[], Tensor]:
        batch = self._buffers.batch(
            key.num_tokens, key.num_seqs, key.num_rows, has_adapters=key.has_adapters
        )
        self._plan(key)
        if self.aux is None or self._kv_cache[0][0].device.type != "cuda":
            return lambda: self._result(batch)

        def run() -> Tensor:
            result = self._result(batch)
            self._keep_states(key.num_tokens)
            return result

        return run

    def _keep_states(self, num_tokens: int) -> None:
        """Copy the hidden states of a captured step out of the graphs' memory.

        The largest bucket is captured first. It allocates the copies, in the runs before its
        capture.
        """
        assert self.aux is not None, "only a model with a head keeps states"
        self._kept_states = self._kept_states or list(map(torch.empty_like, self.aux.states))
        for kept, states in zip(self._kept_states, self.aux.states, strict=True):
            kept[:num_tokens].copy_(states)

    def _plan(self, key: GraphKey) -> None:
        if self._planner is not None:
            self._planner.plan(
                key._replace(has_adapters=False), self._buffers.host, self._buffers.plan
            )

    def _variants(self, key: GraphKey) -> list[GraphKey]:
        """A bucket without adapters and, if steps can have adapters, with them."""
        variants = [key]
        if self._buffers.has_adapters:
            variants.append(key._replace(has_adapters=True))
        return variants

    def _drop(self, key: GraphKey) -> None:
        for one in self._variants(key):
            self._replays.pop(one, None)

    def _fill_with_padding(self, key: GraphKey) -> None:
        self._buffers.host.query_start_loc[0] = 0
        self._buffers.pad(0, 0, 0, key)
        self._buffers.upload(key.num_seqs)
