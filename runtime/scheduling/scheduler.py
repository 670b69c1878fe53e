"""Which tokens are computed next: one token budget a step, no phases, plain data in and out.

    schedule() -> SchedulerOutput -> (the runner) -> StepResult -> update() -> [SequenceOutput]

`schedule` may run one step ahead: while step N is on the device, step N+1 is planned as if every
sequence of N goes on, and its decode rows read N's tokens on the device. What N ends is found by
`update(N)`; its entry in N+1 is dropped when N+1 comes back. Rows and blocks that a step in flight
uses are not given away.

Sequences that decode get their token of every step, so a long prompt never stalls a stream; with a
target for inter-token latency, prompts get no more of a step than that leaves them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter
from typing import TypeVar

from ostinato.conf.schema import SchedulerConfig, SchedulingPolicy
from ostinato.runtime.costs.step_limits import StepLimits, upper_limits
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager, PrefixMatch
from ostinato.runtime.scheduling.beam_groups import BeamGroups, is_parked
from ostinato.runtime.scheduling.itl_bound import ItlBound
from ostinato.runtime.scheduling.queue_checks import check, check_queues
from ostinato.runtime.scheduling.sequence import Sequence, SequenceStatus, check_prompt_length
from ostinato.runtime.scheduling.step_plan import StepPlan
from ostinato.runtime.scheduling.ttft_forecast import QueueLoad, queue_load
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import (
    AdmittedSequence,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)

__all__ = ("Scheduler",)

MAX_STEPS_IN_FLIGHT = 2

_RUNNING = SequenceStatus.running
_PREEMPTED = SequenceStatus.preempted
_PARKED = SequenceStatus.parked
_FINISHED = SequenceStatus.finished
_order = attrgetter("order")
T = TypeVar("T")

# A policy is the first part of a sequence's order; its arrival is the second.
_POLICY_RANKS = {
    SchedulingPolicy.fcfs: lambda request: 0,
    SchedulingPolicy.priority: lambda request: request.priority,
}


class Scheduler:
    """Continuous batching with chunked prefill, prefix sharing and preemption by recomputation.

    Running sequences are kept in the policy's order. The first can always go on: on a shortage of
    blocks the last gives up its own and waits again, in its old place in the queue. Nothing is
    admitted whose known tokens do not fit as a whole, with a block to spare for each sequence ahead
    of it.

    Args:
        config: row and token limits, policy.
        cache: the blocks; not shared with another scheduler.
        max_model_len: tokens of prompt plus output that one sequence may have.
        limits: the largest step; None = what the configuration has, or its upper bounds.
        bound: keeps steps with decodes within a target; None = there is none.
        whole_prompts: a prompt is never computed in chunks, as encoders need it.

    Raises:
        ValueError: one sequence of `max_model_len` tokens does not fit into the cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        *,
        max_model_len: int,
        limits: StepLimits | None = None,
        bound: ItlBound | None = None,
        whole_prompts: bool = False,
    ) -> None:
        needed = -(-max_model_len // cache.block_size)
        if cache.num_blocks < needed:
            raise ValueError(
                f"one sequence of max_model_len={max_model_len} tokens needs {needed} blocks of "
                f"{cache.block_size} tokens, the KV cache has {cache.num_blocks}; lower "
                f"model.max_model_len to at most {cache.num_blocks * cache.block_size} "
                "or raise cache.memory_gib"
            )
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # computed, prefix hits excluded, recomputation included
        self.num_output_tokens = 0
        self.limits = limits or upper_limits(config)
        self.bound = bound
        self._whole_prompts = whole_prompts
        self._cache = cache
        self._rank = _POLICY_RANKS[config.policy]
        self._num_arrivals = 0
        self._num_ended = 0  # by themselves, not aborted
        self._num_ended_tokens = 0  # output tokens of those
        self._sequences: dict[str, Sequence] = {}  # those without a terminal output yet
        self._waiting: list[Sequence] = []  # in the policy's order; holds neither rows nor blocks
        self._running: list[Sequence] = []  # in the policy's order
        self._draining: set[Sequence] = set()  # preempted or finished, but in a step in flight
        self._free_rows = list(range(self.limits.max_num_seqs))  # heap
        self._in_flight: deque[StepPlan] = deque()
        self._beams = BeamGroups(cache, self._place, self._drop)
        self._blocked: Sequence | None = None  # the first waiting one when it last lacked blocks
        self._blocked_room = 0  # free blocks, less the spare ones, that were not enough for it

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a step has not come back."""
        return bool(self._sequences or self._in_flight)

    @property
    def num_running(self) -> int:
        """Sequences that take part in the next step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row and blocks, preempted ones included."""
        return len(self._waiting) + sum(s.status is _PREEMPTED for s in self._draining)

    def load(self) -> QueueLoad:
        """What a request that comes now finds ahead of it. O(sequences)."""
        waiting = [*self._waiting, *(s for s in self._draining if s.status is _PREEMPTED)]
        mean_output = self._num_ended_tokens / self._num_ended if self._num_ended else None
        return queue_load(self._running, waiting, len(self._free_rows), mean_output)

    def requests(self) -> dict[str, Sequence]:
        """Requests that have not ended, by id, in order of arrival; of a beam search its first."""
        return dict(self._sequences)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: its id is in use, its prompt is empty or leaves no room for output.
        """
        if request.request_id in self._sequences:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} is in use; wait for its end or choose another",
                param="request_id",
            )
        check_prompt_length(request, self.max_model_len)
        order = (self._rank(request), self._num_arrivals)
        self._num_arrivals += 1
        sequence = Sequence(request, order, self.max_model_len)
        self._sequences[request.request_id] = sequence
        if request.sampling.use_beam_search:
            self._beams.begin(sequence, self.max_model_len)
        insort(self._waiting, sequence, key=_order)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request now. Its terminal output, or None when it has ended or was never added."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        for one in [sequence] if sequence.beam is None else self._beams.end(request_id):
            self._drop(one)
        return SequenceOutput(request_id, [], FinishReason.abort)

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step; it must be executed, and `update` called with its result.

        Returns:
            None when nothing can run: there is no work, or all of it waits for the step in flight.

        Raises:
            RuntimeError: two steps are in flight.
        """
        if len(self._in_flight) >= MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(
                f"{len(self._in_flight)} steps are in flight; call update() with the oldest first"
            )
        step = self._plan()
        if not step.scheduled and not self._in_flight and self._release_parked():
            step = self._plan()
        output = step.close(self.limits.max_num_batched_tokens)
        if output is not None:
            self._in_flight.append(step)
        return output

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceOutput]:
        """Take in a step's tokens, in the order in which steps were scheduled.

        Returns:
            One entry per sequence with a new token; with a finish reason for those that end.

        Raises:
            ValueError: `output` is not the oldest step in flight, or `result` has not one token for
                each of its entries that sample.
        """
        step = self._in_flight[0] if self._in_flight else None
        if step is None or step.output is not output:
            raise ValueError("update() needs the oldest step in flight, as schedule() returned it")
        token_ids, logprobs = result.token_ids, result.logprobs
        if len(token_ids) != step.num_samples or len(logprobs or token_ids) != step.num_samples:
            raise ValueError(
                f"the step samples {step.num_samples} tokens, its result has {len(token_ids)} "
                f"tokens and {len(logprobs or ())} log-probabilities"
            )
        self._in_flight.popleft()
        if step.num_prompt_logits:
            step.take_prompt_logprobs(result)
        endings = step.take_pooled(result) if step.num_pooled else []
        outputs: list[SequenceOutput] = []
        has_ended = False
        index = 0
        for entry, sequence in zip(output.scheduled, step.sequences, strict=True):
            sequence.num_in_flight -= 1
            if entry.samples:
                if sequence.status is _FINISHED:
                    pass
                elif sequence.beam is not None:
                    self._beams.take(sequence, logprobs[index] if logprobs else None)
                else:
                    outputs.append(self._append_token(sequence, index, result))
                index += 1
            if sequence.status is not _RUNNING:
                has_ended = True
                self._settle(sequence)
        self.num_output_tokens += len(outputs)
        if has_ended:
            self._running = [s for s in self._running if s.status is _RUNNING]
        for ending in (*endings, *self._beams.advance()):
            del self._sequences[ending.request_id]
            self.num_output_tokens += sum(len(beam.token_ids) for beam in ending.beams or ())
            outputs.append(ending)
        return outputs

    def check_integrity(self) -> None:
        """Check rows, queues, tables and blocks against each other. O(blocks): for idle moments.

        Raises:
            AssertionError: they disagree; the text names the part at fault.
        """
        num_rows = self.limits.max_num_seqs
        check_queues(
            self._running, self._waiting, self._draining, self._free_rows, num_rows=num_rows
        )
        holders = [*self._running, *self._draining]
        live = {s.request.request_id for s in (*holders, *self._waiting) if not s.is_finished}
        check(live == set(self._sequences), "requests and queues disagree")
        self._cache.check_integrity(sequence.block_table for sequence in holders)
        if not self.has_work:
            num_held = self._cache.num_blocks - self._cache.num_free_blocks
            check(num_held == 0, f"{num_held} blocks are held without work")

    def _plan(self) -> StepPlan:
        allowance = None if self.bound is None else self.bound.open(self._running)
        step = StepPlan(self.limits.max_num_batched_tokens, allowance)
        self._grow_running(step)
        while self._admit_waiting(step):
            self._grow_running(step)
        return step

    def _grow_running(self, step: StepPlan) -> None:
        """Plan the next tokens of running sequences that come before the first waiting one."""
        running, waiting = self._running, self._waiting
        begin, end = step.num_grown, len(running)
        if begin < end and waiting and not step.is_closed and waiting[0].order < running[-1].order:
            end = bisect_left(running, waiting[0].order, lo=begin, key=_order)
        block_size = self._cache.block_size
        scheduled, sequences = step.scheduled, step.sequences
        for index, sequence in enumerate(running[begin:end], begin):
            if sequence.status is not _RUNNING:
                break  # it and all behind it gave up their blocks for those before
            start = sequence.num_computed_tokens
            if start < sequence.num_given_tokens:
                num_left = sequence.num_given_tokens - start
                limit = step.chunk_limit(len(running) - index - 1, num_left, start)
                self._grow_given(sequence, 1 if sequence.is_decoding else limit, step)
                continue
            if sequence.beam is not None:
                continue  # its candidates wait for those of the others
            if start + 1 >= sequence.max_num_tokens:
                continue  # its last token is on its way
            new_block_ids: list[int] | None = []
            if start == len(sequence.block_table.block_ids) * block_size:
                new_block_ids = self._take_room(sequence, step, self._next_block)
                if new_block_ids is None:
                    continue
            sequence.num_computed_tokens = start + 1
            sequence.num_in_flight += 1
            step.num_samples += 1
            step.num_tokens_left -= 1
            scheduled.append(ScheduledSequence(sequence.row, start, 1, [], new_block_ids, True))
            sequences.append(sequence)
        step.num_grown = min(end, len(running))

    def _grow_given(self, sequence: Sequence, limit: int, step: StepPlan) -> None:
        """Plan the next `limit` of the given tokens that a running sequence has left."""
        if limit < 1:
            return
        new_block_ids: list[int] = []
        if (beam := sequence.beam) is not None:
            copies = self._take_room(sequence, step, self._writable_block)
            if copies is None:
                return
            step.block_copies += copies
            if beam.is_moved:
                # Its tokens and table are other ones than the row's last: the row begins anew.
                beam.is_moved = False
                new_block_ids = sequence.block_table.block_ids[:]
                self._announce(sequence, step)
        if not sequence.is_decoding:
            step.take_chunk(limit, sequence.num_computed_tokens)
        self._plan_chunk(sequence, limit, new_block_ids, step)

    def _next_block(self, sequence: Sequence) -> list[int] | None:
        return self._cache.allocate(sequence.block_table, sequence.num_computed_tokens + 1)

    def _writable_block(self, sequence: Sequence) -> list[tuple[int, int]] | None:
        return self._cache.make_writable(sequence.block_table, sequence.num_computed_tokens)

    def _take_room(
        self, sequence: Sequence, step: StepPlan, take: Callable[[Sequence], T | None]
    ) -> T | None:
        """What `take` gives a running sequence; None when it has to wait, or was preempted itself.

        Sequences behind it are preempted, the last first, until there is one. With a step in flight
        their blocks come back with its update, so the sequence then sits out this step.
        """
        cache = self._cache
        while not step.is_stalled:
            taken = take(sequence)
            if taken is not None:
                return taken
            if any(cache.num_reclaimable_blocks(s.block_table) for s in self._draining):
                step.is_stalled = step.is_closed = True
            elif self._preempt_last() is sequence:
                break
        return None

    def _admit_waiting(self, step: StepPlan) -> bool:
        """Start waiting sequences while rows, tokens and blocks last.

        Returns:
            Whether running sequences have not had their turn: those that come before the next
            waiting one, or all that are left when nobody else is admitted.
        """
        running, waiting = self._running, self._waiting
        step.is_closed = step.is_closed or not step.takes_prompts
        while waiting and not step.is_closed:
            sequence = waiting[0]
            if step.num_grown < len(running) and running[step.num_grown].order < sequence.order:
                return True
            match = self._make_room(sequence, step)
            if match is None:
                step.is_closed = True
                break
            start = len(match.block_ids) * self._cache.block_size
            limit = step.chunk_limit(
                len(running) - step.num_grown, sequence.num_tokens - start, start
            )
            if limit < (sequence.num_tokens - start if self._whole_prompts else 1):
                step.is_closed = True
                break
            del waiting[0]
            self._start(sequence, match, limit, step)
            step.is_closed = not step.takes_prompts
        return step.num_grown < len(running)

    def _make_room(self, sequence: Sequence, step: StepPlan) -> PrefixMatch | None:
        """A row and blocks for a waiting sequence, if need be from running ones behind it.

        Returns:
            Its cached prefix, or None when it has to wait.
        """
        behind = self._running[step.num_grown :]
        if not (self._free_rows or behind):
            return None
        cache = self._cache
        room = cache.num_free_blocks - step.num_grown
        if sequence is self._blocked and room <= self._blocked_room and not behind:
            return None  # a long prompt is not looked up again in every step that it waits
        match = cache.match_prefix(
            sequence.block_table, sequence.token_ids, sequence.max_cached_tokens
        )
        missing = self._num_missing_blocks(sequence, match, step)
        if not (self._free_rows and missing <= 0) and behind:
            self._preempt_behind(behind, missing)
            missing = self._num_missing_blocks(sequence, match, step)
        if self._free_rows and missing <= 0:
            return match
        if missing > 0:
            self._blocked = sequence
            self._blocked_room = cache.num_free_blocks - step.num_grown
        return None

    def _num_missing_blocks(self, sequence: Sequence, match: PrefixMatch, step: StepPlan) -> int:
        """Free blocks that its admission lacks, with one to spare for each sequence ahead of it.

        Without the spare ones it would be preempted by those within a few steps of its admission.
        """
        cache = self._cache
        needed = cache.num_missing_blocks(sequence.num_tokens, match) + step.num_grown
        return needed - cache.num_free_blocks

    def _preempt_behind(self, behind: list[Sequence], missing: int) -> None:
        """Preempt as many of the last of `behind` as it takes to get a row and the missing blocks.

        None of them when even all would not suffice, or when sequences that are draining will.
        """
        cache = self._cache
        missing -= sum(cache.num_reclaimable_blocks(s.block_table) for s in self._draining)
        needs_row = not (self._free_rows or self._draining)
        num_victims = 0
        while (missing > 0 or needs_row) and num_victims < len(behind):
            num_victims += 1
            missing -= cache.num_reclaimable_blocks(behind[-num_victims].block_table)
            needs_row = False
        if missing > 0 or needs_row:
            return
        for _ in range(num_victims):
            self._preempt_last()

    def _start(self, sequence: Sequence, match: PrefixMatch, limit: int, step: StepPlan) -> None:
        """Give a waiting sequence a row and blocks; plan its first chunk of `limit` tokens."""
        cache, table = self._cache, sequence.block_table
        admitted = cache.admit(table, match, sequence.num_tokens)
        assert admitted, f"{sequence!r} has room but was not admitted"
        num_cached = len(match.block_ids) * cache.block_size
        sequence.num_computed_tokens = num_cached
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
            cache.count_lookup(sequence.num_prompt_tokens, num_cached)
        sequence.row = heappop(self._free_rows)
        sequence.status = _RUNNING
        sequence.num_given_tokens = sequence.num_tokens
        self._running.insert(step.num_grown, sequence)
        step.num_grown += 1
        if sequence.beam is not None:
            sequence.beam.is_moved = False
        self._announce(sequence, step)
        step.take_chunk(limit, sequence.num_computed_tokens)
        self._plan_chunk(sequence, limit, table.block_ids[:], step)

    @staticmethod
    def _announce(sequence: Sequence, step: StepPlan) -> None:
        """Tell the runner whose the row is from this step on."""
        output_token_ids = sequence.token_ids[sequence.num_prompt_tokens :]
        step.admitted.append(AdmittedSequence(sequence.row, sequence.request, output_token_ids))

    def _plan_chunk(
        self, sequence: Sequence, limit: int, new_block_ids: list[int], step: StepPlan
    ) -> None:
        """Plan the next `limit` of the tokens that the sequence was admitted with."""
        start = sequence.num_computed_tokens
        end = start + limit
        is_pooled = sequence.request.pooling is not None
        samples = end == sequence.num_given_tokens and not is_pooled
        num_prompt_logits = sequence.num_prompt_logits(start, end)
        sequence.num_computed_tokens = end
        sequence.num_in_flight += 1
        step.num_samples += samples
        step.num_pooled += is_pooled
        step.num_prompt_logits += num_prompt_logits
        step.num_tokens_left -= end - start
        step.scheduled.append(
            ScheduledSequence(
                sequence.row,
                start,
                end - start,
                sequence.token_ids[start:end],
                new_block_ids,
                samples,
                num_prompt_logits,
                is_pooled,
            )
        )
        step.sequences.append(sequence)
        self.num_prompt_tokens += max(0, min(end, sequence.num_prompt_tokens) - start)
        self._cache.register(sequence.block_table, sequence.token_ids, end)

    def _append_token(self, sequence: Sequence, index: int, result: StepResult) -> SequenceOutput:
        """Take in a sampled token and decide whether it is the last."""
        request_id, token_id = sequence.request.request_id, result.token_ids[index]
        logprob = result.logprobs[index] if result.logprobs else None
        grammar = result.endings.get(index)
        if grammar:
            sequence.status = _FINISHED
            del self._sequences[request_id]
            return SequenceOutput(
                request_id, [], FinishReason.error, error=grammar, is_refusal=True
            )
        sequence.append(token_id)
        finish_reason, stop_reason = sequence.ending() or (None, None)
        is_complete = grammar is not None and finish_reason is not FinishReason.stop
        if is_complete:
            finish_reason = FinishReason.stop
        cache, table, num_computed = self._cache, sequence.block_table, sequence.num_computed_tokens
        if num_computed // cache.block_size > table.num_registered:
            cache.register(table, sequence.token_ids, num_computed)
        if finish_reason is not None:
            self._num_ended += 1
            self._num_ended_tokens += sequence.num_output_tokens
            sequence.status = _FINISHED
            del self._sequences[request_id]
        is_first = sequence.num_output_tokens == 1
        prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        return SequenceOutput(
            request_id,
            [token_id],
            finish_reason,
            stop_reason,
            None if logprob is None else [logprob],
            (sequence.num_cached_tokens or 0) if is_first else 0,
            prompt_logprobs=prompt_logprobs,
            is_complete=is_complete,
        )

    def _free_blocks(self, sequence: Sequence) -> None:
        self._cache.free(sequence.block_table)
        sequence.num_computed_tokens = 0

    def _preempt_last(self) -> Sequence:
        """Take the last running sequence's row and blocks; it waits again, to be recomputed."""
        sequence = self._running.pop()
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._retire(sequence, _PARKED if is_parked(sequence) else _PREEMPTED)
        return sequence

    def _release_parked(self) -> bool:
        """Take the rows and blocks of beams that wait for others, which may wait for those.

        Returns:
            Whether there were any.
        """
        parked = [sequence for sequence in self._running if is_parked(sequence)]
        for sequence in parked:
            self._running.remove(sequence)
            self._retire(sequence, _PARKED)
        return bool(parked)

    def _place(self, sequence: Sequence) -> None:
        """A beam that goes on: it runs when there is a row, or else it waits and is recomputed."""
        if sequence.status is _RUNNING:
            return
        if sequence.block_table.block_ids and self._free_rows:
            sequence.row = heappop(self._free_rows)
            sequence.status = _RUNNING
            insort(self._running, sequence, key=_order)
            return
        self._free_blocks(sequence)
        sequence.status = SequenceStatus.waiting
        insort(self._waiting, sequence, key=_order)

    def _drop(self, sequence: Sequence) -> None:
        """End a sequence without news of it."""
        if sequence.status is _RUNNING:
            self._running.remove(sequence)
            self._retire(sequence, _FINISHED)
            return
        if sequence.status is not _PARKED and sequence not in self._draining:
            del self._waiting[bisect_left(self._waiting, sequence.order, key=_order)]
        sequence.status = _FINISHED

    def _retire(self, sequence: Sequence, status: SequenceStatus) -> None:
        sequence.status = status
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Take back a retired sequence's row and blocks, once no step in flight uses them."""
        if sequence.num_in_flight:
            self._draining.add(sequence)
            return
        self._draining.discard(sequence)
        self._free_blocks(sequence)
        heappush(self._free_rows, sequence.row)
        if sequence.status is _PREEMPTED:
            insort(self._waiting, sequence, key=_order)
