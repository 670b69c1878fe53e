"""The engine: `step()` schedules, executes and reports. The one loop of the whole system.

    schedule -> execute -> update

Runs in its own process behind runtime/process/engine_main.py, or in-process behind
runtime/llm.py; the code is the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ostinato.graphs.bundle import Bundle
from ostinato.graphs.seal import CompileMonitor
from ostinato.runtime.costs.cost_table import Chunk, CostTable
from ostinato.runtime.engine.engine_state import EngineState, describe_engine
from ostinato.runtime.engine.step_observer import StepObserver
from ostinato.runtime.execution.model_runner import ModelRunner, PendingStep
from ostinato.runtime.grammar.store import GrammarStore
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.kv.page_mapper import CachePages
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.scheduling.ttft_forecast import predict_ttft
from ostinato.runtime.types.engine_info import EngineStats, ServedModel
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("Engine",)

_GRAMMAR_WAIT_S = 0.02  # an engine without other work looks for new requests this often


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it."""

    def __init__(  # noqa: PLR0913 - its parts, put together in one place
        self,
        scheduler: Scheduler,
        cache: KVCacheManager,
        runner: ModelRunner,
        monitor: CompileMonitor,
        model: ServedModel,
        bundle: Bundle | None = None,
        *,
        overlap: bool = False,
        cost_table: CostTable | None = None,
        observer: StepObserver | None = None,
        pages: CachePages | None = None,
    ) -> None:
        """
        Args:
            scheduler: decides every step.
            cache: the scheduler's.
            runner: executes the steps.
            monitor: counts late compiles.
            model: what is served.
            bundle: what the start has compiled, or None.
            overlap: launch each step before the last one's tokens are read, so that scheduling and
                reporting happen while the device works.
            cost_table: seconds of steps, as measured at the start; None = not measured.
            observer: sees every step; None = one that keeps none in a file.
            pages: of the cache, to be mapped before they are used; None = that is done already.
        """
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._monitor = monitor
        self.model = model
        self.bundle = bundle  # what its start has compiled, or None
        self._max_in_flight = 2 if overlap else 1
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self.cost_table = cost_table
        self._grammars = GrammarStore(model)
        runner.use_grammars(self._grammars.matcher)
        self._observer = observer or StepObserver()
        self._pages = pages
        self._num_requests = 0
        self._num_request_tokens = 0  # of their prompts
        self._num_steps = 0
        self._step_seconds = 0.0
        self._num_admitted = 0
        self._queue_seconds = 0.0
        self._busy_seconds = 0.0  # steps, and what was between them while there was work
        self._busy_until: float | None = None  # end of the last step; None = there was no work left

    @property
    def has_work(self) -> bool:
        """Whether a request is running or waiting."""
        return self._scheduler.has_work or self._grammars.num_waiting > 0

    def add_request(self, request: Request) -> None:
        """Queue a request; `step` reports its tokens. It was validated before it came here.

        One with a grammar is queued when that is built; steps go on meanwhile.
        """
        self._observer.add(request)
        if request.grammar:
            self._grammars.add(request)
        else:
            self._scheduler.add(request)
        self._num_requests += 1
        self._num_request_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request now; its terminal output, or None when it had ended already."""
        self._observer.forget(request_id)
        if self._grammars.release(request_id):
            return SequenceOutput(request_id, [], FinishReason.abort)
        return self._scheduler.abort(request_id)

    def take_progress(self) -> dict[str, int]:
        """How far requests have come whose steps gave no news since the last call.

        Returns:
            Positions computed, by request id: of prompts in chunks, and of beam searches.
        """
        progress, self._observer.progress = self._observer.progress, {}
        return progress

    def abort_all(self) -> list[SequenceOutput]:
        """End everything; the terminal outputs."""
        request_ids = [*self._scheduler.requests(), *self._grammars.request_ids()]
        outputs = (self.abort(request_id) for request_id in request_ids)
        return [output for output in outputs if output is not None]

    def step(
        self, announce: Callable[[list[str], float], object] | None = None
    ) -> list[SequenceOutput]:
        """Launch a step, take in the oldest one that is due; every scheduled sequence advances.

        Args:
            announce: called before a step that admits requests, or computes more than one token
                of a sequence, with the ids of the former and the seconds that it should take (0
                without step costs).

        Returns:
            The news, empty when nothing could run or, with overlap, the first step is under way.
        """
        begin = time.perf_counter()
        news = self._take_grammars() if self._grammars.num_waiting else []
        output = self._schedule()
        if self._pages is not None:
            self._pages.use(self._cache.highest_block_id)
            self._pages.set_busy(True)
        if output is not None:
            if output.admitted:
                self._count_admitted(output)
            if announce is not None and (output.admitted or output.num_tokens > output.num_seqs):
                ids = [admitted.request.request_id for admitted in output.admitted]
                announce(ids, self._predicted_seconds(output))
            self._monitor.begin_step(output.num_tokens, output.num_seqs)
            self._in_flight.append((output, self._runner.launch(output)))
            ran = self._runner.graphs.last_step
            self._observer.launch(ran.kind.value, ran.num_tokens)
        if self._in_flight and (output is None or len(self._in_flight) == self._max_in_flight):
            oldest, pending = self._in_flight.popleft()
            if oldest is not output:
                self._monitor.begin_step(oldest.num_tokens, oldest.num_seqs)
            ended = self._scheduler.update(oldest, self._runner.read(pending))
            self._observer.end(oldest, ended)
            news += ended
            for one in ended:
                if one.finish_reason is not None:
                    self._grammars.release(one.request_id)
            self._num_steps += 1
        self._monitor.end_step()
        end = time.perf_counter()
        self._step_seconds += end - begin
        self._busy_seconds += end - (self._busy_until or begin)
        self._busy_until = end if self.has_work else None
        if self._pages is not None:
            self._pages.set_busy(self.has_work)
        return news

    def _take_grammars(self) -> list[SequenceOutput]:
        """Queue the requests whose grammars are built; the end of those that have none."""
        timeout_s = 0.0 if self._scheduler.has_work else _GRAMMAR_WAIT_S
        ready, ended = self._grammars.take_ready(timeout_s)
        for request in ready:
            self._observer.grammar_built(request)
            self._scheduler.add(request)
        return ended

    def _schedule(self) -> SchedulerOutput | None:
        scheduler, observer = self._scheduler, self._observer
        num_preemptions = scheduler.num_preemptions
        output = scheduler.schedule()
        if observer.traced and scheduler.num_preemptions != num_preemptions:
            requests = scheduler.requests()
            observer.preempted(
                [one for one in observer.traced if one in requests and not requests[one].is_running]
            )
        if output is not None:
            observer.begin(
                output,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_free_blocks=self._cache.num_free_blocks,
            )
        return output

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False when sequences still use some."""
        return self._cache.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError when rows, queues or blocks disagree. O(blocks), for idle times."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Free what the programs hold and stop watching for late compiles; no step may follow."""
        if self._pages is not None:
            self._pages.close()
        self._monitor.close()
        self._grammars.close()
        self._in_flight.clear()
        self._runner.graphs.close()

    def predict_ttft(self, num_prompt_tokens: int) -> float | None:
        """Seconds until a request that is added now has its first token; None without step costs.

        O(requests): for admission and statistics, not for every step.
        """
        if self.cost_table is None:
            return None
        scheduler = self._scheduler
        return predict_ttft(
            scheduler.load(),
            num_prompt_tokens,
            costs=self.cost_table,
            limits=scheduler.limits,
            bound=scheduler.bound,
        )

    def stats(self) -> EngineStats:
        """A snapshot for metrics and health."""
        cache, scheduler = self._cache, self._scheduler
        step_seconds = 0.0
        if self.cost_table is not None:
            load = scheduler.load()
            step_seconds = self.cost_table.decode_seconds(max(1, load.num_decodes), load.context)
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._grammars.num_waiting,
            num_waiting_for_grammar=self._grammars.num_waiting,
            # Without a KV cache the scheduler still counts blocks, which hold nothing.
            num_blocks=cache.num_blocks if self.model.has_kv_cache else 0,
            num_free_blocks=cache.num_free_blocks if self.model.has_kv_cache else 0,
            num_steps=self._num_steps,
            steps_by_kind=dict(self._runner.graphs.steps_by_kind),
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_output_tokens=scheduler.num_output_tokens,
            prefix_queries=cache.prefix_queries,
            prefix_hits=cache.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_evictions=cache.num_evictions,
            num_admitted=self._num_admitted,
            queue_seconds=self._queue_seconds,
            late_compiles=self._monitor.late_compiles,
            step_seconds=self._step_seconds,
            model_seconds=self._runner.model_seconds,
            device_seconds_by_kind=self._runner.device_seconds_by_kind,
            grammar_seconds=self._runner.grammar_seconds,
            grammar_build_seconds=self._grammars.build_seconds,
            max_num_seqs=scheduler.limits.max_num_seqs,
            max_num_batched_tokens=scheduler.limits.max_num_batched_tokens,
            predicted_step_seconds=step_seconds,
            predicted_ttft_seconds=self.predict_ttft(self._mean_prompt_tokens()) or 0.0,
            host_gap_seconds=max(0.0, self._busy_seconds - self._runner.model_seconds),
            num_scheduled_tokens=self._observer.num_scheduled_tokens,
            num_padding_tokens=self._runner.graphs.num_padding_tokens,
            iteration_tokens=self._observer.iteration_tokens[:],
        )

    def inspect(self) -> EngineState:
        """What it is doing, for people; O(blocks), so only when somebody looks."""
        return describe_engine(
            self._scheduler.requests().values(),
            self._cache,
            self.stats(),
            self._observer.recent,
            [key.num_tokens for key in self._runner.graphs.captured_keys],
        )

    def _predicted_seconds(self, output: SchedulerOutput) -> float:
        if self.cost_table is None:
            return 0.0
        chunks = [
            Chunk(s.num_new_tokens, s.start) for s in output.scheduled if s.num_new_tokens > 1
        ]
        contexts = [s.start for s in output.scheduled if s.num_new_tokens == 1]
        mean = sum(contexts) / max(1, len(contexts))
        return self.cost_table.mixed_seconds(len(contexts), mean, chunks)

    def _count_admitted(self, output: SchedulerOutput) -> None:
        # The sender's clock is this machine's; what resumes has waited before.
        now = time.monotonic()
        for admitted in output.admitted:
            if not admitted.output_token_ids:
                self._num_admitted += 1
                self._queue_seconds += max(0.0, now - admitted.request.arrival_time)

    def _mean_prompt_tokens(self) -> int:
        """Of the requests so far; before the first, 256 or what a prompt may have."""
        if not self._num_requests:
            return min(256, self.model.max_model_len - 1)
        return round(self._num_request_tokens / self._num_requests)
