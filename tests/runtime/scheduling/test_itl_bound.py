"""The inter-token-latency target, with simulated steps that take the times of a cost table."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.cost_table import Chunk, CostTable
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.itl_bound import ItlBound, StepAllowance
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.types.outputs import TokenLogprobs
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput, StepResult
from tests.runtime.cost_tables import make_table, tables

# 2 ms a step, 0.1 ms a token, 0.05 ms a sequence, 1 us for each token of context attended to.
TABLE = make_table()
LEAST = 4


def allowance(target_ms: float, num_decodes: int, context: float, least: int = LEAST):
    bound = ItlBound(TABLE, target_ms / 1e3, least_chunk=least)
    return bound.allowance(num_decodes, context)


def test_the_largest_chunk_that_fits() -> None:
    # Decodes take `2 + 4 * 0.15 + 4 * 0.016` ms, which is 2.664 ms.
    # A chunk of `n` tokens adds `0.05 + 0.1 * n` ms.
    assert allowance(4.0, 4, 16).largest(1000, 0) == 12
    assert allowance(4.0, 4, 16).largest(5, 0) == 5
    # With a context of 100 tokens each token of the chunk costs 0.1 ms more.
    assert allowance(4.0, 4, 16).largest(1000, 100) == 6


def test_log_probabilities_of_decodes_take_their_time() -> None:
    bound = ItlBound(make_table(score_ms=0.1), 4e-3, least_chunk=LEAST)
    assert bound.allowance(4, 16).largest(1000, 0) == 12
    assert bound.allowance(4, 16, num_scored=4).largest(1000, 0) == 8


def test_a_second_chunk_gets_what_the_first_left() -> None:
    step = allowance(4.0, 4, 16)
    step.take(Chunk(8, 0))
    assert step.largest(1000, 0) == 4
    step.take(Chunk(4, 0))
    assert step.largest(1000, 0) == 0


def test_a_target_that_decodes_miss_leaves_a_block_to_the_first_prompt() -> None:
    step = allowance(2.0, 4, 16)
    assert step.largest(1000, 0) == 4
    assert step.largest(3, 0) == 3
    step.take(Chunk(4, 0))
    assert step.largest(1000, 0) == 0


@given(
    tables(),
    st.integers(1, 50),
    st.integers(0, 300),
    st.floats(0.0, 40.0),
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(0, 300), st.booleans()), min_size=1, max_size=4
    ),
)
def test_what_was_allowed_keeps_the_target(
    table: CostTable,
    num_decodes: int,
    context: int,
    target_s: float,
    wanted: list[tuple[int, int, bool]],
) -> None:
    step = StepAllowance(
        table, target_s, least_chunk=LEAST, num_decodes=num_decodes, context=context
    )
    chunks: list[Chunk] = []
    for limit, start, has_scores in wanted:
        num_tokens = step.largest(limit, start, has_scores=has_scores)
        assert 0 <= num_tokens <= limit
        if num_tokens:
            chunks.append(Chunk(num_tokens, start, num_tokens if has_scores else 0))
            step.take(chunks[-1])
    assert chunks, "no chunk was allowed"
    if table.mixed_seconds(num_decodes, context, chunks) > target_s + 1e-6:
        assert len(chunks) == 1
        assert chunks[0].num_tokens <= LEAST


# --- the scheduler, with a clock ------------------------------------------------------------------

TIMES = make_table(pair_us=0.1)


class TimedEngine:
    """Runs a scheduler's steps. Each takes the table's seconds. Every sampled token is 5."""

    def __init__(
        self,
        target_ms: float | None,
        *,
        max_num_batched_tokens: int = 256,
        times: CostTable = TIMES,
    ) -> None:
        bound = None
        if target_ms is not None:
            bound = ItlBound(times, target_ms / 1e3, least_chunk=4)
        self.times = times
        self.scheduler = Scheduler(
            SchedulerConfig(),
            KVCacheManager(2000, 4),
            max_model_len=1000,
            limits=StepLimits(8, max_num_batched_tokens),
            bound=bound,
            score_tokens=times.seconds_per_score / times.seconds_per_token,
        )
        self.now = 0.0
        self.num_steps = 0
        self.token_times: dict[str, list[float]] = {}

    def add(
        self,
        request_id: str,
        num_prompt_tokens: int,
        max_tokens: int,
        prompt_logprobs: int | None = None,
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        prompt = [hash((request_id, i)) % 1000 for i in range(num_prompt_tokens)]
        self.scheduler.add(
            Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
        )
        self.token_times[request_id] = []

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output is not None
        starts = [entry.start for entry in output.scheduled if not entry.token_ids]
        chunks = [
            Chunk(e.num_new_tokens, e.start, e.num_prompt_logits)
            for e in output.scheduled
            if e.token_ids
        ]
        self.now += self.times.mixed_seconds(len(starts), sum(starts) / max(1, len(starts)), chunks)
        samples = sum(entry.num_logits for entry in output.scheduled)
        scores = [
            [TokenLogprobs(-1.0, 1, [], [])] * entry.num_prompt_logits
            for entry in output.scheduled
            if entry.num_prompt_logits
        ]
        result = StepResult([5] * samples, prompt_logprobs=scores)
        for one in self.scheduler.update(output, result):
            self.token_times[one.request_id].append(self.now)
        self.num_steps += 1
        return output

    def longest_gap(self, request_id: str) -> float:
        """The most milliseconds between successive tokens of a request."""
        times = self.token_times[request_id]
        return 1e3 * max(late - early for early, late in pairwise(times))


def run_streams_beside_long_prompts(target_ms: float | None) -> TimedEngine:
    engine = TimedEngine(target_ms)
    for index in range(3):
        engine.add(f"stream-{index}", 10, 300)
    for _ in range(5):
        engine.step()
    engine.add("long-0", 700, 5)
    engine.add("long-1", 500, 5)
    while engine.scheduler.has_work:
        engine.step()
        assert engine.num_steps < 1000, "the requests do not end"
    return engine


def test_without_a_target_a_long_prompt_holds_up_every_stream() -> None:
    engine = run_streams_beside_long_prompts(None)
    assert engine.longest_gap("stream-0") > 30.0


@pytest.mark.parametrize("target_ms", [3.0, 4.0, 6.0, 12.0])
def test_no_gap_exceeds_the_target_while_long_prompts_are_computed(target_ms: float) -> None:
    engine = run_streams_beside_long_prompts(target_ms)
    for index in range(3):
        assert engine.longest_gap(f"stream-{index}") <= target_ms + 1e-6
        assert len(engine.token_times[f"stream-{index}"]) == 300
    assert all(len(engine.token_times[f"long-{index}"]) == 5 for index in range(2))


def test_chunks_use_what_the_target_leaves() -> None:
    """Each chunk but the last fills its step to less than 0.2 ms below the target."""
    engine = TimedEngine(6.0)
    engine.add("stream", 10, 300)
    engine.step()
    engine.add("long", 400, 1)
    before = engine.now
    sizes = []
    while not engine.token_times["long"]:
        output = engine.step()
        sizes.append(output.scheduled[-1].num_new_tokens)
        assert 1e3 * (engine.now - before) <= 6.0 + 1e-6
        if len(engine.token_times["long"]) == 0:
            assert 1e3 * (engine.now - before) > 5.8  # one more token costs at most 0.14 ms
        before = engine.now
    assert sizes[0] > sizes[-2] > 1
    assert sum(sizes) == 400


@pytest.mark.parametrize("target_ms", [4.0, 12.0, None])
def test_log_probabilities_of_a_long_prompt_count_like_its_tokens(target_ms: float | None) -> None:
    """A step with log-probabilities of the prompt keeps the target.

    Without a target it takes no longer than a step without log-probabilities.
    """
    times = make_table(pair_us=0.1, score_ms=0.4)
    engine = TimedEngine(target_ms, times=times)
    engine.add("stream", 10, 400)
    engine.step()
    engine.add("long", 700, 1, prompt_logprobs=5)
    while engine.scheduler.has_work:
        engine.step()
    longest_ms = target_ms or 1e3 * times.mixed_seconds(1, 400, [Chunk(255, 700)])
    assert engine.longest_gap("stream") <= longest_ms + 1e-6
    assert len(engine.token_times["long"]) == 1


def test_a_prompt_alone_is_not_cut() -> None:
    engine = TimedEngine(3.0)
    engine.add("long", 200, 2)
    assert [entry.num_new_tokens for entry in engine.step().scheduled] == [200]


def test_a_target_out_of_reach_still_lets_prompts_advance() -> None:
    engine = run_streams_beside_long_prompts(1.0)
    # A step computes 4 prompt tokens, so the first prompt takes most of the streams' 300 steps.
    assert len(engine.token_times["long-0"]) == 5
    assert len(engine.token_times["long-1"]) == 5
    assert engine.token_times["long-0"][0] < engine.token_times["long-1"][0]
