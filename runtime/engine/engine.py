"""The engine: each call of `step()` schedules one step, launches it and reports outputs.

    schedule -> launch -> read -> update

runtime/process/engine_loop.py runs it in a process of its own, runtime/llm.py in the caller's. The
model runs behind an `Executor` (runtime/execution/executor.py), so this module imports no torch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from ostinato.runtime.costs.cost_table import Chunk, CostTable
from ostinato.runtime.engine.accepted_inputs import accepted_inputs
from ostinato.runtime.engine.adapter_loads import AdapterLoads
from ostinato.runtime.engine.engine_counters import EngineCounters
from ostinato.runtime.engine.engine_state import EngineState, describe_engine
from ostinato.runtime.engine.pending_requests import PendingRequests
from ostinato.runtime.engine.step_observer import StepObserver
from ostinato.runtime.engine.tier_copies import TierCopies
from ostinato.runtime.errors import InvalidRequestError, RankFailedError
from ostinato.runtime.execution.executor import Executor, Pending, StartProfile, StopProfile
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.scheduling.ttft_forecast import predict_ttft
from ostinato.runtime.types.engine_info import EngineStats, ServedModel
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("Announce", "Engine")

_LOG = logging.getLogger(__name__)

Announce = Callable[[list[str], float], object]
"""Called before a step with the ids of the requests that it admits and its predicted seconds."""

# How long an engine without other work waits for the files of an adapter before it looks for new
# requests.
_READ_WAIT_S = 0.02
# How long the end of an engine waits until KV blocks have been written to the disk. The client
# kills an engine that does not end within 5 s.
_FLUSH_S = 3.0


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCacheManager,
        executor: Executor,
        model: ServedModel,
        *,
        cost_table: CostTable | None = None,
        observer: StepObserver | None = None,
        num_adapter_slots: int = 0,
        copies: TierCopies | None = None,
    ) -> None:
        """
        Args:
            scheduler: plans the steps.
            cache: the scheduler's KV cache manager.
            executor: runs the steps; closed with the engine.
            model: the served model's facts.
            cost_table: the step-cost table; None = not measured.
            observer: called with every step; None = a default observer that writes no file.
            num_adapter_slots: low-rank adapters that can be loaded at once.
            copies: copies KV blocks to slower tiers; None = no block is copied.
        """
        self.model = model
        self.cost_table = cost_table
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self._pending = PendingRequests(executor, accepted_inputs(model), rank=scheduler.rank_of)
        self._adapters = AdapterLoads(executor, num_adapter_slots)
        self._copies = copies
        self._can_rest = False  # nothing could run in the last step
        self._observer = observer or StepObserver()
        self._counters = EngineCounters()
        self._in_flight: deque[tuple[SchedulerOutput, Pending]] = deque()
        self._failure: RankFailedError | None = None  # why no further step can run

    @property
    def has_work(self) -> bool:
        """Whether a request, a step in flight or a load of blocks or an adapter is unfinished."""
        waits = self._pending.num_waiting > 0 or self._adapters.num_loading > 0
        return self._scheduler.has_work or waits

    @property
    def has_copies(self) -> bool:
        """Whether KV blocks wait for a copy in a slower tier. `step` makes the copies."""
        return self._copies is not None and self._copies.has_stores

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self._cache.num_blocks

    @property
    def draft_costs(self) -> CostTable | None:
        """The step costs of the draft model; None without a draft model, or if not measured."""
        drafts = self._scheduler.drafts
        return None if drafts is None else drafts.model_costs

    def add_request(self, request: Request) -> None:
        """Queue a request, which the caller has validated. `step` returns its outputs.

        A request with a grammar, images or audio is queued when the grammar is built and the
        images or the audio are encoded. Steps go on meanwhile.

        Raises:
            InvalidRequestError: the scheduler refuses the request (`Scheduler.add`), its adapter is
                not loaded, or the model does not take its images or its audio.
            RankFailedError: an earlier step failed.
        """
        if self._failure is not None:
            raise RankFailedError(
                f"the engine has ended and a new one must be made: {self._failure}",
                self._failure.reason,
            )
        self._pending.check(request)
        self._adapters.check(request)
        self._scheduler.check(request)  # a request that becomes complete in a step is not refused
        if not self._pending.add(request):
            self._scheduler.add(request)
        self._observer.add(request)
        self._counters.add(request)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request now; returns its last output, or None if it is unknown or has ended."""
        self._observer.forget(request_id)
        if self._pending.release(request_id):
            return SequenceOutput(request_id, [], FinishReason.abort)
        return self._scheduler.abort(request_id)

    def abort_all(self) -> list[SequenceOutput]:
        """End every request; returns their last outputs."""
        request_ids = [*self._scheduler.requests(), *self._pending.request_ids()]
        outputs = (self.abort(request_id) for request_id in request_ids)
        return [output for output in outputs if output is not None]

    def take_progress(self) -> dict[str, int]:
        """The progress of the requests that advanced without an output.

        Such requests are prompts in chunks, beam searches, and the request for which encodings of
        images or audio were computed. Progress is returned once.

        Returns:
            Request id -> positions computed so far.
        """
        progress, self._observer.progress = self._observer.progress, {}
        return progress

    def step(self, announce: Announce | None = None) -> list[SequenceOutput]:
        """Launch the next step, and read the oldest launched step.

        A step is read only if this call launched none, or if `max_in_flight` steps are in flight.

        Args:
            announce: called before a step that admits requests, or computes more than one token of
                a sequence, drafts not counted. Without step costs the predicted seconds are 0.

        Returns:
            The outputs of the step that was read, if any, and the errors of requests whose grammar
            could not be built.

        Raises:
            RankFailedError: a rank has ended or hangs. After this and any other exception no
                further step can run.
        """
        try:
            return self._step(announce)
        except RankFailedError as error:
            self._failure = error
            raise
        except BaseException as error:  # even a KeyboardInterrupt leaves a step half done
            self._failure = RankFailedError(f"a step ended with {error!r}", "error")
            raise

    def _step(self, announce: Announce | None) -> list[SequenceOutput]:
        begin = time.perf_counter()
        outputs = self._take_pending(announce) if self._pending.num_waiting else []
        if self._adapters.num_loading:
            self._adapters.advance(0.0 if self._scheduler.has_work else _READ_WAIT_S)
        if self._copies is not None:
            self._copies.advance(waits=self._can_rest, has_in_flight=bool(self._in_flight))
        scheduled = self._schedule()
        if scheduled is not None and scheduled.scheduled:
            self._launch(scheduled, announce)
        elif scheduled is not None and self._copies is not None:
            self._copies.start_alone(scheduled)
        self._can_rest = scheduled is None and not self._in_flight
        if self._in_flight and (
            scheduled is None or len(self._in_flight) == self._executor.max_in_flight
        ):
            outputs += self._read()
        if not self.has_work and not self.has_copies:
            self._executor.idle()
            if self._scheduler.drafts is not None:
                self._scheduler.drafts.idle()
        self._counters.end_step(begin, has_work=self.has_work)
        return outputs

    def _take_pending(self, announce: Announce | None) -> list[SequenceOutput]:
        """Queue the requests that are complete; returns outputs for failed grammars."""
        ready = self._pending.take_ready(announce, is_busy=self._scheduler.has_work)
        if ready.encoding is not None:
            self._observer.progress[ready.encoding] = 0
        for output in ready.failed:
            self._observer.forget(output.request_id)
        for request in ready.built:
            self._observer.grammar_built(request)
        for request in ready.complete:
            self._scheduler.add(request)
        return ready.failed

    def _schedule(self) -> SchedulerOutput | None:
        scheduler, observer = self._scheduler, self._observer
        num_preemptions = scheduler.num_preemptions
        output = scheduler.schedule()
        if observer.traced and scheduler.num_preemptions != num_preemptions:
            requests = scheduler.requests()
            observer.preempted(
                [one for one in observer.traced if one in requests and not requests[one].is_running]
            )
        return output

    def _launch(self, output: SchedulerOutput, announce: Announce | None) -> None:
        scheduler = self._scheduler
        self._observer.begin(
            output,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=self._cache.num_free_blocks,
        )
        if output.admitted:
            self._counters.admit(output)
        if announce is not None and (
            output.admitted or output.num_tokens - output.num_drafts > output.num_seqs
        ):
            ids = [admitted.request.request_id for admitted in output.admitted]
            announce(ids, self._predicted_seconds(output))
        pending = self._executor.launch(output)
        if self._copies is not None:
            self._copies.note(output)
        self._in_flight.append((output, pending))
        self._observer.launch(pending.kind, pending.num_padded_tokens)

    def _read(self) -> list[SequenceOutput]:
        """Wait for the oldest launched step and update the scheduler with its result."""
        output, pending = self._in_flight.popleft()
        outputs = self._scheduler.update(output, self._executor.read(pending))
        self._observer.end(output, outputs)
        self._scheduler.observe(self._observer.recent[-1].seconds)
        for one in outputs:
            if one.finish_reason is not None:
                self._pending.release(one.request_id)
        self._counters.num_steps += 1
        return outputs

    def begin_adapter(self, slot: int, path: str, digest: str) -> None:
        """Begin to load a low-rank adapter into a slot, while steps go on.

        No unfinished request may use the slot. `take_adapters` reports the end of the load.

        Args:
            slot: 0 to `lora.num_slots` - 1. Its adapter, if it has one, is replaced.
            path: the directory of the adapter's files.
            digest: the digest of these files.

        Raises:
            InvalidRequestError: there is no such slot, or a load into it has not ended.
        """
        self._adapters.begin(slot, path, digest)

    def take_adapters(self) -> list[tuple[int, str]]:
        """(slot, "" or why it failed) of each load that has ended since the last call."""
        return self._adapters.take_ended()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks and everything that drafters have learned.

        Returns:
            False if sequences hold blocks. Then cached blocks are kept; drafters forget anyway.

        Raises:
            InvalidRequestError: the directory of copies on disk is being prepared, or the copies
                cannot be removed.
        """
        if self._copies is not None and self._copies.is_opening:
            raise InvalidRequestError(
                "cache.disk_dir is being prepared: the files of the weights are read; try again"
            )
        if self._scheduler.drafts is not None:
            self._scheduler.drafts.proposer.reset()
        # Steps of requests that have all ended hold blocks until they are read.
        while self._in_flight and not self._scheduler.requests():
            self._read()
        is_reset = self._cache.reset()
        if is_reset and self._copies is not None:
            self._copies.clear()
        return is_reset

    def start_profile(self, directory: str) -> None:
        """Record the steps with torch's profiler from now on.

        Args:
            directory: where the trace is written, one file for each rank.

        Raises:
            InvalidRequestError: a profile is being recorded, or the directory cannot be written.
        """
        self._executor.call(StartProfile(directory))

    def stop_profile(self) -> list[str]:
        """End the recording and write it, which may take seconds; returns the trace of each rank.

        Raises:
            InvalidRequestError: no profile is being recorded, or the trace cannot be written.
        """
        return self._executor.call(StopProfile())

    def check_integrity(self) -> None:
        """Raise AssertionError if rows, queues and blocks contradict each other. O(blocks)."""
        try:
            self._scheduler.check_integrity()
            self._pending.encodings.check_integrity()
        except AssertionError as error:
            self._failure = RankFailedError(f"the engine is damaged: {error}", "error")
            raise

    def close(self) -> None:
        """Free the executor's memory and threads; no step may follow.

        KV blocks that wait for a copy on disk are written before, for a few seconds at most.
        """
        if self._copies is not None and self._failure is None:
            try:
                while self._in_flight:
                    self._read()  # a block is complete when the step that fills it was executed
                self._copies.flush(_FLUSH_S)
            except Exception as error:  # the rest must be closed
                _LOG.warning("blocks of the KV cache were not copied at the end: %r", error)
        self._in_flight.clear()
        self._executor.close()
        if self._copies is not None:
            self._copies.close()
        if self._scheduler.drafts is not None:
            self._scheduler.drafts.close()

    def predict_ttft(self, num_prompt_tokens: int) -> float | None:
        """Seconds until a request that is added now has its first token; None without step costs.

        The call takes O(requests), so it is not made in every step.
        """
        if self.cost_table is None:
            return None
        scheduler = self._scheduler
        return self._pending.encodings.predicted_seconds + predict_ttft(
            scheduler.load(),
            num_prompt_tokens,
            costs=self.cost_table,
            limits=scheduler.limits,
            bound=scheduler.bound,
        )

    def stats(self) -> EngineStats:
        """A snapshot for metrics and health."""
        cache, scheduler, counters = self._cache, self._scheduler, self._counters
        pending, encodings = self._pending, self._pending.encodings
        executor = self._executor.stats()
        step_seconds = 0.0
        if self.cost_table is not None:
            load = scheduler.load()
            step_seconds = self.cost_table.decode_seconds(max(1, load.num_decodes), load.context)
        tiers, states = cache.tiers, cache.states
        mean_prompt_tokens = counters.mean_prompt_tokens(self.model.max_model_len)
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + pending.num_waiting,
            num_waiting_for_grammar=pending.num_waiting_for_grammar,
            # Without a KV cache the scheduler counts blocks too, but these blocks hold nothing.
            num_blocks=cache.num_blocks if self.model.has_kv_cache else 0,
            num_free_blocks=cache.num_free_blocks if self.model.has_kv_cache else 0,
            num_state_slots=0 if states is None else states.num_slots,
            num_free_state_slots=0 if states is None else states.num_unused,
            num_steps=counters.num_steps,
            steps_by_kind=executor.steps_by_kind,
            layers_by_program=executor.layers_by_program,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_output_tokens=scheduler.num_output_tokens,
            prefix_queries=cache.prefix_queries,
            prefix_hits=cache.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_evictions=cache.num_evictions,
            num_admitted=counters.num_admitted,
            queue_seconds=counters.queue_seconds,
            late_compiles=executor.late_compiles,
            step_seconds=counters.step_seconds,
            model_seconds=executor.model_seconds,
            device_seconds_by_kind=executor.device_seconds_by_kind,
            grammar_seconds=executor.grammar_seconds,
            grammar_build_seconds=executor.grammar_build_seconds,
            max_num_seqs=scheduler.limits.max_num_seqs,
            max_num_batched_tokens=scheduler.limits.max_num_batched_tokens,
            predicted_step_seconds=step_seconds,
            predicted_ttft_seconds=self.predict_ttft(mean_prompt_tokens) or 0.0,
            host_gap_seconds=max(0.0, counters.busy_seconds - executor.model_seconds),
            num_scheduled_tokens=self._observer.num_scheduled_tokens,
            num_padding_tokens=executor.num_padding_tokens,
            iteration_tokens=self._observer.iteration_tokens[:],
            speculation=None if scheduler.drafts is None else scheduler.drafts.stats.copy(),
            tiers={} if tiers is None else tiers.stats(),
            num_tier_loads=0 if tiers is None else tiers.costs.num_loads,
            num_refused_tier_loads=0 if tiers is None else tiers.costs.num_refused,
            tier_load_seconds=0.0 if tiers is None else tiers.costs.load_seconds,
            num_waiting_for_encodings=pending.num_waiting_for_encodings,
            num_inputs_encoded=encodings.num_encoded,
            num_encoding_hits=encodings.num_hits,
            encode_seconds=encodings.encode_seconds,
        )

    def inspect(self) -> EngineState:
        """A description of rows, queue, blocks and recent steps. O(blocks)."""
        return describe_engine(
            self._scheduler.requests().values(),
            self._cache,
            self.stats(),
            self._observer.recent,
            self._executor.stats().bucket_tokens,
        )

    def _predicted_seconds(self, output: SchedulerOutput) -> float:
        if self.cost_table is None:
            return 0.0
        chunks = [
            Chunk(s.num_new_tokens, s.start, s.num_prompt_logits)
            for s in output.scheduled
            if not s.is_decode
        ]
        chunks += [Chunk(s.num_drafts, s.start + 1) for s in output.scheduled if s.num_drafts]
        contexts = [s.start for s in output.scheduled if s.is_decode]
        mean = sum(contexts) / max(1, len(contexts))
        return self.cost_table.mixed_seconds(len(contexts), mean, chunks)
