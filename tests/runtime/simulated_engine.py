"""Drives a scheduler against the simulated device, and checks every step."""

from __future__ import annotations

from collections import deque

from ostinato.conf.schema import SchedulerConfig, SchedulingPolicy
from ostinato.conf.sections.cache_schema import StorePolicy
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.costs.cost_table import Chunk, CostTable
from ostinato.runtime.costs.step_limits import upper_limits
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.kv.load_costs import LoadCosts
from ostinato.runtime.kv.tier_index import TierIndex
from ostinato.runtime.scheduling.itl_bound import ItlBound
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput, StepResult
from tests.runtime.drafters import OracleDrafter
from tests.runtime.simulated_device import (
    SimulatedDevice,
    reference_beams,
    reference_output,
    reference_prompt_scores,
)
from tests.runtime.speculation.draft_device import SimulatedDrafter
from tests.runtime.speculation.head_device import SimulatedHeadDrafter

_SLOW_BLOCK_BYTES = 40_000_000  # a load has at most two blocks of this size


class SimulatedEngine:
    """An engine's loop in three parts: `launch` a step, `land` the oldest one in flight, `abort`.

    A step runs on the device when it is launched; its tokens reach the scheduler when it lands.
    """

    def __init__(
        self,
        *,
        total_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: SchedulingPolicy = SchedulingPolicy.fcfs,
        prefix_caching: bool = True,
        costs: CostTable | None = None,
        target_s: float = 0.0,
        drafter: OracleDrafter | SimulatedDrafter | SimulatedHeadDrafter | None = None,
        tiers: TierIndex | None = None,
        score_tokens: float = 0.0,
        hold_seed: int | None = None,
        num_lanes: int = 1,
        image_tokens: int = 0,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
        num_states: int = 0,
    ) -> None:
        """With `costs`, `_check_target` compares steps that have decodes with `target_s`.

        With several lanes, one step of each lane is in flight, and the lanes decode different
        sequences.
        """
        self._num_lanes = num_lanes
        self._image_tokens = image_tokens
        self.max_in_flight = 2 if num_lanes == 1 else num_lanes
        self._has_holds = hold_seed is not None
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
        )
        self.max_model_len = max_model_len
        self.drafter = drafter
        self.tiers = tiers
        self.cache = KVCacheManager(
            total_blocks,
            block_size,
            enable_prefix_caching=prefix_caching,
            tiers=tiers,
            groups=groups,
            step_tokens=max_num_batched_tokens,
            num_states=num_states,
        )
        self.costs, self.target_s = costs, target_s
        bound = None if costs is None else ItlBound(costs, target_s, least_chunk=block_size)
        self.score_tokens = score_tokens
        self.scheduler = Scheduler(
            self.config,
            self.cache,
            max_model_len=max_model_len,
            limits=upper_limits(
                self.config, max_drafts=0 if drafter is None else drafter.max_drafts
            )._replace(image_tokens=image_tokens),
            bound=bound,
            proposer=drafter,
            score_tokens=score_tokens,
            max_in_flight=self.max_in_flight,
            has_lanes=num_lanes > 1,
        )
        self.device = SimulatedDevice(total_blocks, block_size, hold_seed, groups, num_states)
        self._windows = self.device.memory.windows
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, SequenceOutput] = {}
        self.num_steps = 0
        self.num_loaded_blocks = 0
        self.num_copies = 0
        self.num_right_drafts = 0  # including those after the end of an answer
        self._num_reported = 0  # accepted drafts in the reports of all requests
        self._in_flight: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self._writers: deque[dict[int, str]] = deque()  # per step in flight: block id -> request
        self._holders: deque[dict[int, str]] = deque()  # per step in flight: row -> request

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        if self.drafter is not None and not request.sampling.use_beam_search:
            tokens, _, _ = reference_output(request, self.max_model_len, self._windows)
            self.drafter.outputs[request.request_id] = tokens
        self.scheduler.check_integrity()

    def launch(self) -> SchedulerOutput | None:
        """Schedule a step and run it on the device."""
        num_running = self.scheduler.num_running
        if self.tiers is not None:
            self.tiers.set_buffers(self.num_steps % 3)
        output = self.scheduler.schedule()
        if output is None:
            can_go_on = self._in_flight or self.device.loads or not self.scheduler.has_work
            assert can_go_on, "there is work, but no step can be scheduled"
            return None
        self._check_limits(output)
        if not output.scheduled:
            assert not self._in_flight, "transfers without a step come while a step is in flight"
            self.device.transfer(output)
            self.num_steps += 1
            return output
        self._check_lanes(output, num_running)
        self._in_flight.append((output, self.device.execute(output)))
        self._check_target(output)
        self._check_images(output)
        self._check_ends(output)
        self._check_overlap(output)
        self._check_windows()
        self.num_steps += 1
        self.num_copies += len(output.block_copies)
        self.scheduler.check_integrity()
        return output

    def land(self) -> list[SequenceOutput]:
        """Give the oldest step's tokens to the scheduler."""
        output, result = self._in_flight.popleft()
        self._writers.popleft()
        self._holders.popleft()
        self._check_hashes()
        self.num_right_drafts += sum(max(0, count - 1) for count in result.counts or ())
        outputs = self.scheduler.update(output, result)
        for item in outputs:
            self._record(item)
        self.scheduler.check_integrity()
        return outputs

    def finish_loads(self) -> None:
        """Ends all loads that are in progress, and reports the stores that failed."""
        for transfer_id, num_blocks in self.device.finish_loads():
            self.scheduler.finish_load(transfer_id, num_blocks)
            self.num_loaded_blocks += num_blocks
        for place in self.device.lost_places:
            assert self.tiers is not None
            self.tiers.lose(place)
        self.device.lost_places.clear()
        self.scheduler.check_integrity()

    def abandon_loads(self) -> None:
        """No sequence waits any more for the loads that are in progress."""
        for load in self.device.loads:
            self.scheduler.abandon_load(load.transfer_id)
        self.scheduler.check_integrity()

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        if request_id in self.endings:
            assert output is None, "a second terminal output"
        else:
            ending = SequenceOutput(request_id, [], FinishReason.abort)
            assert output == ending
            self._record(ending)
        self.scheduler.check_integrity()

    def run(self, *, lookahead: bool) -> None:
        """Launch and land until all requests have ended. Their lengths limit the steps."""
        lengths = [
            _most_tokens(request, self.max_model_len)
            for request_id, request in self.requests.items()
            if request_id not in self.endings
        ]
        # The first sequence in order advances at least every other step. At worst each sequence is
        # computed twice: once until it is preempted, and once as the first.
        last_step = self.num_steps + 4 * sum(lengths) + 10 + 2 * len(lengths)
        if self._has_holds:
            last_step *= 4  # each token may wait for two steps, with one in flight after each
            if self.device.states is not None:  # and tokens before it are computed again
                last_step *= 2 * self.cache.block_size + 2
        last_step *= self._num_lanes
        while self.scheduler.has_work:
            assert self.num_steps <= last_step, f"{list(self.scheduler.requests())} starve"
            launched = self.launch()
            if launched is None or self.num_steps % 3 == 0:
                self.finish_loads()
            is_full = self.num_in_flight == self.max_in_flight
            if self._in_flight and (not lookahead or launched is None or is_full):
                self.land()

    def check_drained(self) -> None:
        """Each request ended once, with its tokens when alone (if aborted, the first ones)."""
        assert set(self.endings) == set(self.requests)
        for request_id, request in self.requests.items():
            if request.sampling.use_beam_search:
                beams = self.endings[request_id].beams
                is_aborted = self.endings[request_id].finish_reason is FinishReason.abort
                assert is_aborted or beams == reference_beams(
                    request, self.max_model_len, self._windows
                )
                continue
            tokens, reason, stop_reason = reference_output(
                request, self.max_model_len, self._windows
            )
            ending = self.endings[request_id]
            if ending.finish_reason is FinishReason.abort:
                assert self.tokens[request_id] == tokens[: len(self.tokens[request_id])]
                continue
            assert self.tokens[request_id] == tokens
            assert (ending.finish_reason, ending.stop_reason) == (reason, stop_reason)
        assert self.cache.num_free_blocks == self.cache.num_blocks
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        num_tokens = sum(len(tokens) for tokens in self.tokens.values())
        assert self.scheduler.num_output_tokens == num_tokens
        assert not self.device.loads
        assert self.drafter is None or not self.drafter.live
        if self.scheduler.drafts is not None:
            num_accepted = self.scheduler.drafts.stats.num_accepted_tokens
            assert num_accepted == self._num_reported <= self.num_right_drafts
        self.scheduler.check_integrity()

    def _record(self, item: SequenceOutput) -> None:
        assert item.request_id not in self.endings, "an output of a request that has ended"
        if item.beams is not None:
            scores = reference_prompt_scores(self.requests[item.request_id], self._windows)
            assert item.prompt_logprobs == scores
            self.tokens[item.request_id] = [t for beam in item.beams for t in beam.token_ids]
            self.endings[item.request_id] = item
            return
        if item.speculation is not None:
            assert item.speculation.num_accepted_tokens <= len(item.new_token_ids)
            self._num_reported += item.speculation.num_accepted_tokens
        is_first = not self.tokens[item.request_id]
        assert is_first or item.num_cached_tokens == 0
        if is_first and item.new_token_ids:
            scores = reference_prompt_scores(self.requests[item.request_id], self._windows)
            assert item.prompt_logprobs == scores
        else:
            assert item.prompt_logprobs is None
        self.tokens[item.request_id] += item.new_token_ids
        if item.finish_reason is not None:
            self.endings[item.request_id] = item

    def _check_limits(self, output: SchedulerOutput) -> None:
        rows = [entry.row for entry in output.scheduled]
        assert rows or output.transfers, "an empty step"
        assert len(set(rows)) == len(rows) <= self.config.max_num_seqs
        assert all(0 <= row < self.config.max_num_seqs for row in rows)
        assert {admitted.row for admitted in output.admitted} <= set(rows)
        num_tokens = sum(entry.num_new_tokens for entry in output.scheduled)
        assert num_tokens == output.num_tokens <= self.config.max_num_batched_tokens
        # Scores count as tokens; only the first one of a chunk may pass the limit.
        num_score_tokens = self.score_tokens * output.num_prompt_logits
        over = num_tokens + num_score_tokens - self.config.max_num_batched_tokens
        assert not output.num_prompt_logits or over <= self.score_tokens + 1e-6

    def _check_lanes(self, output: SchedulerOutput, num_running: int) -> None:
        """With lanes, a step decodes no sequence that is in another step in flight.

        It decodes at most its part of the sequences that ran before it.
        """
        if self._num_lanes == 1:
            return
        rows = {entry.row for one, _ in self._in_flight for entry in one.scheduled}
        decoded = [entry.row for entry in output.scheduled if not entry.token_ids]
        assert not rows & set(decoded), "a sequence is in two lanes"
        assert len(decoded) <= -(-num_running // self._num_lanes)

    def _check_target(self, output: SchedulerOutput) -> None:
        """A step of decodes and prompts keeps the target, or has at most a block of one prompt.

        The entry of a decoding beam carries its token. It looks like the last token of a beam that
        is computed again. The step passes if it keeps the target with either reading of these
        entries.
        """
        costs = self.costs
        if costs is None:
            return
        decodes = [e for e in output.scheduled if self._is_decode(e)]
        chunks = [e for e in output.scheduled if not self._is_decode(e)]
        if not chunks and not output.num_drafts:
            return
        drafts = [Chunk(e.num_drafts, e.start + 1) for e in decodes if e.num_drafts]
        as_decodes = _mixed_seconds(costs, decodes, chunks, drafts)
        unclear = [e for e in decodes if e.token_ids and self._is_beam(e)]
        certain = [e for e in decodes if e not in unclear]
        as_chunks = _mixed_seconds(costs, certain, [*unclear, *chunks], drafts)
        if min(as_decodes, as_chunks) > self.target_s + 1e-9:
            assert len(chunks) <= 1
            most = max(self.cache.block_size, self._image_tokens)
            assert all(chunk.num_new_tokens <= most for chunk in chunks)

    def _check_images(self, output: SchedulerOutput) -> None:
        """No step ends within an image whose tokens see each other."""
        for entry in output.scheduled if self._image_tokens else ():
            end = entry.start + entry.num_new_tokens
            images = self.requests[self.device.rows[entry.row].request_id].images
            assert not any(image.begin < end < image.end for image in images)

    def _is_decode(self, entry: ScheduledSequence) -> bool:
        if not self._is_beam(entry):
            return entry.is_decode
        request = self.requests[self.device.rows[entry.row].request_id]
        return entry.start >= len(request.prompt_token_ids) and entry.num_new_tokens == 1

    def _is_beam(self, entry: ScheduledSequence) -> bool:
        request = self.requests[self.device.rows[entry.row].request_id]
        return request.sampling.use_beam_search

    def _check_windows(self) -> None:
        """No sequence holds more blocks of its own than `sequence_blocks` says."""
        if self.cache.has_windows:
            most = self.cache.sequence_blocks(self.max_model_len)
            for sequence in self.scheduler.queues.running:
                assert self.cache.num_reclaimable_blocks(sequence.block_table) <= most

    def _check_hashes(self) -> None:
        """Only blocks whose tokens have all arrived are registered for lookup."""
        for sequence in (*self.scheduler.queues.running, *self.scheduler.queues.draining):
            num_known = sequence.num_tokens // self.cache.block_size
            assert sequence.block_table.num_registered <= num_known

    def _check_ends(self, output: SchedulerOutput) -> None:
        """Checks that no step computes a request's last allowed token.

        This token is sampled, but never fed back.
        """
        for entry in output.scheduled:
            request = self.requests[self.device.rows[entry.row].request_id]
            max_tokens = request.sampling.max_tokens or self.max_model_len
            limit = min(len(request.prompt_token_ids) + max_tokens, self.max_model_len)
            assert entry.start + entry.num_new_tokens < limit

    def _check_overlap(self, output: SchedulerOutput) -> None:
        """Steps in flight use no common row, and write no common block, for different requests.

        In layers with a window, a step can write to blocks that the step before has read last.
        """
        holders = {entry.row: self.device.rows[entry.row].request_id for entry in output.scheduled}
        writers: dict[int, str] = {}
        for entry in output.scheduled:
            tables, memory = self.device.rows[entry.row].tables, self.device.memory
            for position in range(entry.start, entry.start + entry.num_new_tokens):
                for layer in (layer for layer in (0, 1) if not memory.windows[layer]):
                    block_id, _ = memory.place(tables, layer, position)
                    writers[block_id] = holders[entry.row]
        for earlier_writers, earlier_holders in zip(self._writers, self._holders, strict=True):
            for block_id, request_id in writers.items():
                assert earlier_writers.get(block_id, request_id) == request_id
            for row, request_id in holders.items():
                assert earlier_holders.get(row, request_id) == request_id
        self._writers.append(writers)
        self._holders.append(holders)


def _mixed_seconds(
    costs: CostTable,
    decodes: list[ScheduledSequence],
    chunks: list[ScheduledSequence],
    drafts: list[Chunk],
) -> float:
    """Predicted seconds of the step.

    0 if the step has no decodes, or neither prompts nor drafts: then it has no target.
    """
    if not decodes or not (chunks or drafts):
        return 0.0
    context = sum(entry.start for entry in decodes) / len(decodes)
    sizes = [Chunk(entry.num_new_tokens, entry.start, entry.num_prompt_logits) for entry in chunks]
    return costs.mixed_seconds(len(decodes), context, [*sizes, *drafts])


def _most_tokens(request: Request, max_model_len: int) -> int:
    """Tokens that are computed for a request that is never preempted."""
    length = len(request.prompt_token_ids) + (request.sampling.max_tokens or max_model_len)
    if not request.sampling.use_beam_search:
        return length
    # At worst there is room for one beam only, and a beam is computed anew for each of its tokens.
    return length * length * request.sampling.num_candidates


def make_tiers(
    block_size: int,
    num_host_places: int,
    num_disk_places: int,
    *,
    num_per_step: int = 4,
    policy: StorePolicy = StorePolicy.all,
    stores_salted: bool = True,
) -> TierIndex | None:
    """An index of tiers for blocks so large that a step copies `num_per_step`; None = no places."""
    if not num_host_places and not num_disk_places:
        return None
    block_bytes = (4 << 20) // num_per_step
    tiers = TierIndex(
        block_bytes=block_bytes,
        costs=LoadCosts(None, _SLOW_BLOCK_BYTES, block_size),
        num_host_places=num_host_places,
        expects_disk=num_disk_places > 0,
        policy=policy,
        stores_salted=stores_salted,
    )
    if num_disk_places:
        tiers.open_disk(num_disk_places, ())
    return tiers
