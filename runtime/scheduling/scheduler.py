"""The scheduler: decides which tokens each step computes. A step has one token budget.

    schedule() -> SchedulerOutput -> (the executor) -> StepResult -> update() -> [SequenceOutput]

`schedule` may run one step ahead. While step N is on the device, step N+1 is planned as if every
sequence of N continues, and its decode rows read N's tokens on the device. `update(N)` finds the
sequences that N ends. Their entries in N+1 are dropped when N+1 is read. Rows and blocks that a
step in flight uses are not reused. In a pipeline, steps in flight decode different sequences.

A step decodes all decoding sequences that `StepPlanner` does not leave out. Prompts are computed in
chunks beside the decodes. A target for inter-token latency limits the prompt tokens of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from ostinato.conf.schema import SchedulerConfig, SchedulingPolicy
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits, upper_limits
from ostinato.runtime.costs.token_rate import TokenRate
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.decode_shares import DecodeShares
from ostinato.runtime.scheduling.draft_planner import DraftPlanner
from ostinato.runtime.scheduling.itl_bound import ItlBound
from ostinato.runtime.scheduling.loads import BlockLoads
from ostinato.runtime.scheduling.queues import SequenceQueues, by_order, check
from ostinato.runtime.scheduling.sequences.beam_groups import BeamGroups
from ostinato.runtime.scheduling.sequences.sequence import (
    Sequence,
    SequenceStatus,
    check_prompt_length,
    duplicate_id,
)
from ostinato.runtime.scheduling.sequences.sequence_turns import Turns
from ostinato.runtime.scheduling.step_plan import StepPlan
from ostinato.runtime.scheduling.step_planner import StepPlanner
from ostinato.runtime.scheduling.ttft_forecast import QueueLoad, queue_load
from ostinato.runtime.speculation.proposer import Proposer
from ostinato.runtime.types.outputs import GRAMMAR_REFUSAL, FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput, StepResult

__all__ = ("Scheduler",)

_RUNNING = SequenceStatus.running
_FINISHED = SequenceStatus.finished

# The function of a policy computes the first number of a sequence's order (`Turns`).
_POLICY_RANKS = {
    SchedulingPolicy.fcfs: lambda request: 0,
    SchedulingPolicy.priority: lambda request: request.priority,
}


class Scheduler:
    """Continuous batching with chunked prefill, prefix sharing and preemption.

    Running sequences are kept in the policy's order. If no block is free, the last running sequence
    is preempted and waits again at its old place in the queue. So the first sequence can always
    continue.

    Args:
        config: row and token limits, policy.
        cache: the KV cache manager; not shared with another scheduler.
        max_model_len: tokens of prompt plus output that one sequence may have.
        limits: the largest step. None = the configured limits; a limit that is not configured is
            the upper bound for a CPU (`upper_limits`). A sequence gets at most
            `limits.rows_per_seq - 1` draft tokens in one step.
        bound: limits the prompt tokens of steps with decodes; None = no limit.
        whole_prompts: compute each prompt in one step, as encoders need it.
        max_in_flight: steps that may be scheduled before `update` is called for the oldest.
        has_lanes: the model is a pipeline, and each stage computes a different step. A sequence is
            decoded again only when its last token has arrived. Each step decodes an equal part of
            the sequences.
        proposer: the drafter; None = no drafts.
        score_tokens: the cost of one prompt token's log-probability, in tokens of a step's budget.
        draft_costs: the step-cost table by which drafts are chosen; None = all are verified.
        rate: limits the seconds of steps of whole prompts, and learns from them; None = no limit.
        shares: leaves some decodes of large requests out of a step; None = no decode is left out.

    Attributes:
        queues: the sequences by status.
        num_output_tokens: sampled tokens that were returned.

    Raises:
        ValueError: one sequence of `max_model_len` tokens does not fit into the cache.
    """

    def __init__(  # noqa: PLR0913 - its parts, put together in one place
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        *,
        max_model_len: int,
        limits: StepLimits | None = None,
        bound: ItlBound | None = None,
        whole_prompts: bool = False,
        max_in_flight: int = 2,
        has_lanes: bool = False,
        proposer: Proposer | None = None,
        score_tokens: float = 1.0,
        draft_costs: CostTable | None = None,
        rate: TokenRate | None = None,
        shares: DecodeShares | None = None,
    ) -> None:
        needed = cache.sequence_blocks(max_model_len)
        if cache.num_blocks < needed:
            step = ", lower scheduler.max_num_batched_tokens" if cache.has_windows else ""
            raise ValueError(
                f"one sequence of max_model_len={max_model_len} tokens needs {needed} blocks, but "
                f"the KV cache has {cache.num_blocks}; lower model.max_model_len to at most "
                f"{cache.longest_sequence}{step} or raise cache.memory_gib"
            )
        self.max_model_len = max_model_len
        self.num_output_tokens = 0
        max_drafts = 0 if proposer is None else proposer.max_drafts
        self.limits = limits or upper_limits(config, max_drafts=max_drafts)
        self.bound = bound
        self.queues = SequenceQueues(cache, self.limits.max_num_seqs)
        self.drafts = None
        if proposer is not None:
            self.drafts = DraftPlanner(proposer, cache, self.limits, costs=draft_costs)
        self._rate_of_tokens = rate
        self._max_in_flight = max_in_flight
        self._cache = cache
        self._block_size = cache.block_size
        self.rank_of = _POLICY_RANKS[config.policy]
        self._turns = Turns(self.rank_of)
        self._num_ended = 0  # sequences that ended with a sampled token
        self._num_ended_tokens = 0  # output tokens of the sequences in `_num_ended`
        self._sequences: dict[str, Sequence] = {}  # sequences without a terminal output, by id
        self._in_flight: deque[StepPlan] = deque()
        self._last_read: StepPlan | None = None
        self._beams = BeamGroups(cache, self.queues.place, self.queues.drop)
        self._loads = BlockLoads(cache)
        self._planner = StepPlanner(
            self.queues,
            self._loads,
            max_num_tokens=self.limits.max_num_batched_tokens,
            bound=bound,
            drafts=self.drafts,
            whole_prompts=whole_prompts,
            score_tokens=score_tokens,
            rate=rate,
            num_lanes=max_in_flight if has_lanes else 1,
            shares=shares,
            whole_images=self.limits.image_tokens > 0,
        )

    @property
    def has_work(self) -> bool:
        """Whether a request, a step in flight or a load is unfinished."""
        return bool(self._sequences or self._in_flight or self._loads)

    @property
    def num_running(self) -> int:
        """Sequences with a row and blocks, without draining ones."""
        return len(self.queues.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row and blocks, preempted and loading ones included."""
        return self.queues.num_waiting + self._loads.num_waiting

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens computed so far: without prefix hits, with recomputed tokens."""
        return self._planner.num_prompt_tokens

    @property
    def num_preemptions(self) -> int:
        """Number of times that a running sequence lost its row and blocks to another sequence."""
        return self.queues.num_preemptions

    def load(self) -> QueueLoad:
        """The work ahead of a request that would be added now. O(sequences)."""
        queues = self.queues
        mean_output = self._num_ended_tokens / self._num_ended if self._num_ended else None
        next_order = self._turns.next_order
        num_yielding = len(queues.running) - bisect_left(queues.running, next_order, key=by_order)
        return queue_load(
            queues.running,
            queues.waiting_before(next_order),
            queues.num_free_rows + num_yielding,
            mean_output,
        )

    def requests(self) -> dict[str, Sequence]:
        """The unfinished sequences by request id, in order of arrival.

        A beam search has one entry: the sequence with which it began.
        """
        return dict(self._sequences)

    def check(self, request: Request) -> None:
        """Raise the error that `add` would raise.

        Raises:
            InvalidRequestError: the request's id is in use, or its prompt is empty or leaves no
                room for output.
        """
        if request.request_id in self._sequences:
            raise duplicate_id(request.request_id)
        check_prompt_length(request, self.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request.

        `Turns` describes the order of the queue.

        Raises:
            InvalidRequestError: see `check`.
        """
        self.check(request)
        order = self._turns.order_of(request)
        num_tokens = len(request.prompt_token_ids)
        table = self._cache.new_table(
            num_tokens, request.cache_salt, request.all_cache_keys, media=request.media
        )
        sequence = Sequence(request, order, self.max_model_len, table)
        self._sequences[request.request_id] = sequence
        if request.sampling.use_beam_search:
            self._beams.begin(sequence, self.max_model_len)
        elif self._turns.add(sequence):
            self.queues.sort()
        self.queues.wait(sequence)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request now; returns its last output, or None if it is unknown or has ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._forget(request_id)
        for one in [sequence] if sequence.beam is None else self._beams.end(request_id):
            self.queues.drop(one)
        return SequenceOutput(request_id, [], FinishReason.abort)

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step. The caller must execute it and call `update` with its result.

        A step without entries has only transfers. No step is in flight then, and it has no result.

        Returns:
            None if nothing can run: there is no work, or all sequences wait for a step in flight or
            for a load.

        Raises:
            RuntimeError: `max_in_flight` steps are in flight.
        """
        if len(self._in_flight) >= self._max_in_flight:
            raise RuntimeError(
                f"{len(self._in_flight)} steps are in flight; call update() with the oldest first"
            )
        step = self._planner.plan()
        if not step.scheduled and not (step.transfers or self._in_flight):
            step = self._planner.plan() if self.queues.release_parked() else step
        if self._cache.tiers is not None:
            can_go_alone = not self._in_flight
            step.transfers = self._loads.transfers_of(step, can_go_alone=can_go_alone)
        output = step.close()
        if step.scheduled:
            self._in_flight.append(step)
        return output

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceOutput]:
        """Process the result of the oldest step in flight.

        Returns:
            One entry per request with new tokens or an end. Ended ones have a finish reason.

        Raises:
            ValueError: `output` is not the oldest step in flight, or `result` does not fit it.
        """
        step = self._in_flight[0] if self._in_flight else None
        if step is None or step.output is not output:
            raise ValueError("update() needs the oldest step in flight, as schedule() returned it")
        token_ids, logprobs, counts = result.token_ids, result.logprobs, result.counts
        num_tokens = step.num_samples
        is_plain = counts is None and not step.num_drafts and len(token_ids) == num_tokens
        if not is_plain or len(logprobs or token_ids) != num_tokens:
            step.check_tokens(result)
        self._last_read = self._in_flight.popleft()
        if step.num_prompt_logits:
            step.take_prompt_logprobs(result)
        endings = step.take_pooled(result) if step.num_pooled else []
        outputs: list[SequenceOutput] = []
        next_counts = None if counts is None else iter(counts)
        has_ended = False
        index = 0
        if self.drafts is not None:
            self.drafts.take_forced(step, result.forced_token_ids)
        drafts = self.drafts if step.num_drafts else None
        for entry, sequence in zip(output.scheduled, step.sequences, strict=True):
            sequence.num_in_flight -= 1
            if entry.num_logits:
                count = 1 if next_counts is None else next(next_counts)
                verified = drafts.settle(sequence, count - 1) if drafts and count else None
                if sequence.status is _FINISHED:
                    pass
                elif not count:
                    self._hold(sequence)
                elif sequence.beam is not None:
                    self._beams.take(sequence, logprobs[index] if logprobs else None)
                else:
                    found = self._append_tokens(sequence, index, count, result)
                    if drafts and verified:
                        num_new = len(found.new_token_ids)
                        found.speculation = drafts.report(step, verified, num_new)
                    outputs.append(found)
                index += count
            if sequence.status is not _RUNNING:
                has_ended = True
                self.queues.settle(sequence)
        self.num_output_tokens += (
            len(outputs) if counts is None else sum(len(one.new_token_ids) for one in outputs)
        )
        if has_ended:
            self.queues.remove_ended()
        for ending in (*endings, *self._beams.advance()):
            self._forget(ending.request_id)
            self.num_output_tokens += sum(len(beam.token_ids) for beam in ending.beams or ())
            outputs.append(ending)
        return outputs

    def observe(self, seconds: float) -> None:
        """Correct the predicted costs of drafts and whole prompts, and the size of copies.

        Args:
            seconds: duration of the step whose result was processed last.
        """
        step = self._last_read
        if self.drafts is not None and step is not None:
            self.drafts.observe(step, seconds)
        if self._cache.tiers is not None:
            self._cache.tiers.observe_step(seconds)
        if self._rate_of_tokens is not None and step is not None:
            self._rate_of_tokens.observe(step.num_tokens - step.num_tokens_left, seconds)

    def finish_load(self, transfer_id: int, num_blocks: int) -> None:
        """End a load that a step began, and queue the sequences that waited for it.

        Args:
            transfer_id: the id of the `BlockTransfer`.
            num_blocks: leading blocks of the transfer that were loaded; the others failed.

        Raises:
            KeyError: there is no such load.
        """
        for sequence in self._loads.finish(transfer_id, num_blocks):
            self.queues.wait(sequence)

    def abandon_load(self, transfer_id: int) -> None:
        """Queue the sequences that wait for a load, because it takes too long.

        `finish_load` must still be called.

        Raises:
            KeyError: there is no such load.
        """
        for sequence in self._loads.abandon(transfer_id):
            self.queues.wait(sequence)

    def check_integrity(self) -> None:
        """Check rows, queues, tables and blocks against each other. O(blocks).

        Raises:
            AssertionError: the records disagree; the text names the part at fault.
        """
        queues = self.queues
        queues.check_integrity()
        placed = [*queues.running, *queues.draining, *queues.waiting, *self._loads.sequences()]
        live = {s.request.request_id for s in placed if not s.is_finished}
        check(live == set(self._sequences), "requests and queues disagree")
        self._cache.check_integrity([*queues.tables(), *self._loads.tables()])
        if not self.has_work:
            num_held = self._cache.num_blocks - self._cache.num_free_blocks
            check(num_held == 0, f"{num_held} blocks are held without work")

    def _hold(self, sequence: Sequence) -> None:
        """Let a sequence compute its last position again, because the step gave no token."""
        start: int | None = sequence.num_tokens - 1
        if sequence.is_held:  # the step was planned as if the step before gave a token
            start = sequence.num_computed_tokens
        elif self._cache.states is not None and sequence.is_running:
            start = self._cache.rewind_states(sequence.block_table, sequence.token_ids)
        if start is None:
            sequence.num_drafts = 0
            self.queues.give_up(sequence)
        else:
            sequence.hold(start)
        if self._turns.count_hold(sequence):
            self.queues.sort()

    def _append_tokens(
        self, sequence: Sequence, index: int, count: int, result: StepResult
    ) -> SequenceOutput:
        """Append `count` sampled tokens of one step, the first of which is number `index`.

        Tokens after the end of the output are dropped.
        """
        request_id, is_first = sequence.request.request_id, not sequence.num_output_tokens
        finish_reason, stop_reason, error, is_complete = None, None, None, False
        end = index
        while end < index + count and finish_reason is None:
            grammar = result.endings.get(end) if result.endings else None
            if grammar:
                finish_reason, error = FinishReason.error, grammar
                break
            sequence.append(result.token_ids[end])
            end += 1
            finish_reason, stop_reason = sequence.ending() or (None, None)
            is_complete = grammar is not None and finish_reason is not FinishReason.stop
            if is_complete:
                finish_reason = FinishReason.stop
        num_computed = sequence.num_computed_tokens
        if num_computed // self._block_size > sequence.block_table.num_registered:
            self._cache.register(sequence.block_table, sequence.token_ids, num_computed)
        if finish_reason is not None:
            sequence.status = _FINISHED
            if error is None:
                self._num_ended += 1
                self._num_ended_tokens += sequence.num_output_tokens
                if self.drafts is not None:
                    self.drafts.proposer.learn(sequence.request, sequence.token_ids)
            self._forget(request_id)
        logprobs = None
        if result.logprobs and end > index:
            logprobs = [one for one in result.logprobs[index:end] if one is not None] or None
        prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        return SequenceOutput(
            request_id,
            result.token_ids[index:end],
            finish_reason,
            stop_reason,
            logprobs,
            (sequence.num_cached_tokens or 0) if is_first else 0,
            error,
            prompt_logprobs,
            is_complete=is_complete,
            refusal=None if error is None else GRAMMAR_REFUSAL,
        )

    def _forget(self, request_id: str) -> None:
        """Drop the state of a request that has its last output."""
        if self._turns.remove(self._sequences.pop(request_id)):
            self.queues.sort()
        if self.drafts is not None:
            self.drafts.proposer.forget(request_id)
