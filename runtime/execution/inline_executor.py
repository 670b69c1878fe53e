"""The executor that runs one rank in the engine's own process, by function calls."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec
import torch

from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.models.kv_cache import KVCache
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.execution.executor import (
    AdvanceAdapters,
    AdvanceEncodings,
    BeginAdapter,
    BeginEncoding,
    DropDecodeBuckets,
    ExecutorStats,
    Pending,
    RankCall,
    ResetCounters,
    StartProfile,
    StopProfile,
    TouchBlocks,
)
from ostinato.runtime.execution.model_runner import ModelRunner, PendingStep
from ostinato.runtime.execution.profiler import Profiler
from ostinato.runtime.grammar.store import GrammarBuilt, GrammarStore
from ostinato.runtime.kv.page_mapper import CachePages
from ostinato.runtime.types.step import SchedulerOutput, StepResult

if TYPE_CHECKING:
    from ostinato.runtime.execution.encoding.rank_encoder import RankEncoder
    from ostinato.runtime.execution.rank_adapters import RankAdapters
    from ostinato.runtime.tiers.rank_tiers import RankTiers

__all__ = ("InlineExecutor",)


class InlineExecutor:
    """Runs the steps of one `ModelRunner` on the calling thread."""

    def __init__(  # noqa: PLR0913 - the parts of a rank's steps
        self,
        runner: ModelRunner,
        kv_cache: KVCache,
        grammars: GrammarStore,
        monitor: CompileMonitor,
        *,
        pages: CachePages | None = None,
        overlap: bool = False,
        adapters: RankAdapters | None = None,
        tiers: RankTiers | None = None,
        encoder: RankEncoder | None = None,
    ) -> None:
        """
        Args:
            runner: executes the steps.
            kv_cache: the KV cache that the runner uses.
            grammars: builds the grammars. The runner's sampler gets its matchers from this store.
            monitor: counts compilations after the start; closed with the executor.
            pages: maps the KV cache's memory before its first use; None = not needed.
            overlap: a step may be launched before the previous step is read.
            adapters: loads low-rank adapters; None = the model has no room for any.
            tiers: copies KV blocks to host memory and disk; None = no block is copied.
            encoder: encodes images or audio; None = the model takes text only.
        """
        self._runner = runner
        self._kv_cache = kv_cache
        self._grammars = grammars
        self._monitor = monitor
        self._pages = pages
        self._adapters = adapters
        self._tiers = tiers
        self._encoder = encoder
        self._max_in_flight = 2 if overlap else 1
        self._launched: deque[tuple[int, SchedulerOutput, PendingStep]] = deque()
        self._num_steps = 0
        self._highest_block_id = 0
        self._profiler: Profiler | None = None

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def has_lanes(self) -> bool:
        return False

    def launch(self, output: SchedulerOutput) -> Pending:
        step = self._launch(output)
        self._num_steps += 1
        self._launched.append((self._num_steps, output, step))
        ran = self._runner.graphs.last_step
        return Pending(self._num_steps, ran.kind.value, ran.num_tokens)

    def queue(self, output: SchedulerOutput) -> PendingStep:
        """Start a step that is not read: its tokens stay on the device."""
        step = self._launch(output)
        self._monitor.end_step()
        return step

    def _launch(self, output: SchedulerOutput) -> PendingStep:
        if output.transfers:
            assert self._tiers is not None, "only an index of tiers plans transfers"
            self._tiers.start(output.transfers)
        if self._pages is not None:
            self._map_pages(self._pages, output)
        self._monitor.begin_step(output.num_tokens, output.num_seqs)
        return self._runner.launch(output)

    def read(self, pending: Pending) -> StepResult:
        number, output, step = self._launched.popleft()
        assert number == pending.number, f"step {number} is to be read before {pending.number}"
        if number != self._num_steps:  # a later step has been launched
            self._monitor.begin_step(output.num_tokens, output.num_seqs)
        result = self._runner.read(step)
        self._monitor.end_step()
        return result

    def idle(self) -> None:
        if self._pages is not None:
            self._pages.set_busy(False)

    def prepare_grammar(self, request_id: str, grammar: str) -> None:
        self._grammars.prepare(request_id, grammar)

    def take_built_grammars(self, timeout_s: float) -> list[GrammarBuilt]:
        return self._grammars.take_built(timeout_s)

    def release_grammar(self, request_id: str) -> None:
        self._grammars.release(request_id)

    def call(self, call: RankCall) -> list[str]:
        match call:
            case BeginAdapter(slot, path, digest):
                assert self._adapters is not None, "the engine has checked the slot"
                self._adapters.begin(slot, path, digest)
            case AdvanceAdapters(timeout_s):
                assert self._adapters is not None, "a load has begun"
                ended = self._adapters.advance(timeout_s)
                return [msgspec.json.encode(ended).decode() if ended else ""]
            case BeginEncoding():
                assert self._encoder is not None, "the engine has checked what the model takes"
                self._encoder.begin(call)
            case AdvanceEncodings():
                assert self._encoder is not None, "an input has begun"
                return [" ".join(digest.hex() for digest in self._encoder.advance(call))]
            case StartProfile(directory):
                if self._profiler is not None:
                    raise InvalidRequestError(
                        "a profile is being recorded: end it with /stop_profile"
                    )
                self._profiler = Profiler(directory)
            case StopProfile():
                if self._profiler is None:
                    raise InvalidRequestError(
                        "no profile is being recorded: begin one with /start_profile"
                    )
                profiler, self._profiler = self._profiler, None
                return [profiler.stop()]
            case ResetCounters():
                self._runner.reset_counters()
            case DropDecodeBuckets(sizes):
                self._runner.graphs.drop_decode_buckets(sizes)
            case TouchBlocks(num_blocks):
                if self._pages is not None:
                    self._pages.set_busy(True)
                with torch.inference_mode():
                    for page in self._kv_cache.pages:
                        page[: num_blocks + 1].zero_()
                if self._encoder is not None:
                    self._encoder.touch()
            case _:
                assert self._tiers is not None, "the engine has tiers"
                return [self._tiers.answer(call)]
        return [""]

    def stats(self) -> ExecutorStats:
        graphs = self._runner.graphs
        keys = graphs.captured_keys
        return ExecutorStats(
            steps_by_kind=dict(graphs.steps_by_kind),
            layers_by_program=graphs.layers_by_program,
            num_padding_tokens=graphs.num_padding_tokens,
            model_seconds=self._runner.model_seconds,
            device_seconds_by_kind=self._runner.device_seconds_by_kind,
            grammar_seconds=self._runner.grammar_seconds,
            grammar_build_seconds=self._grammars.build_seconds,
            late_compiles=self._monitor.late_compiles,
            decode_buckets=sorted(key.num_seqs for key in keys if key.tokens_per_seq == 1),
            bucket_tokens=sorted({key.num_tokens for key in keys}),
        )

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
        self._monitor.close()
        self._grammars.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._tiers is not None:
            self._tiers.close()
        if self._encoder is not None:
            self._encoder.close()
        self._launched.clear()
        self._runner.graphs.close()

    def _map_pages(self, pages: CachePages, output: SchedulerOutput) -> None:
        """Tell `pages` which blocks are used, and that a step runs."""
        for entry in output.scheduled:
            for block_ids in (entry.new_block_ids, entry.new_window_block_ids):
                if block_ids:
                    self._highest_block_id = max(self._highest_block_id, *block_ids)
        pages.use(self._highest_block_id)
        pages.set_busy(True)
