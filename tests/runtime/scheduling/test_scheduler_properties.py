"""The scheduler against a simulated KV memory: a request's tokens are always those it has alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from ostinato.conf.schema import SchedulingPolicy
from ostinato.conf.sections.cache_schema import StorePolicy
from ostinato.models.kv_groups import WHOLE_CACHE, sequence_blocks
from ostinato.runtime.types.outputs import FinishReason
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from tests.pairwise import all_combinations
from tests.runtime.cost_tables import make_table
from tests.runtime.drafters import OracleDrafter
from tests.runtime.scheduling.drawn_requests import IMAGE_TOKENS, requests
from tests.runtime.scheduling.engine_machine import (
    MAX_MODEL_LEN,
    POLICIES,
    EngineMachine,
    kv_groups,
    rename,
)
from tests.runtime.scheduling.mixed_workload import plain_tokens, run_workload
from tests.runtime.simulated_device import VOCAB_SIZE
from tests.runtime.simulated_engine import SimulatedEngine, make_tiers

SCORE_MS = st.none() | st.floats(0.0, 1.0)


@st.composite
def engines(draw: st.DrawFn) -> SimulatedEngine:
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_num_seqs = draw(st.integers(1, 6))
    accuracy = draw(st.sampled_from([None, None, 0.0, 0.5, 1.0]))
    # These tests do not combine drafts with the lanes of a pipeline.
    num_lanes = draw(st.sampled_from([1, 1, 2, 3])) if accuracy is None else 1
    image_tokens = draw(st.sampled_from([0, 0, IMAGE_TOKENS]))
    groups = draw(kv_groups())
    step_tokens = max_num_seqs + image_tokens + draw(st.integers(0, 24))
    least_blocks = sequence_blocks(groups, block_size, MAX_MODEL_LEN, step_tokens) + 1
    sizes = [(0, 0), (0, 0), (3, 0), (40, 3), (0, 40)] if groups == WHOLE_CACHE else [(0, 0)]
    return SimulatedEngine(
        total_blocks=least_blocks + draw(st.integers(0, 20)),
        block_size=block_size,
        groups=groups,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        image_tokens=image_tokens,
        max_model_len=MAX_MODEL_LEN,
        policy=draw(st.sampled_from(POLICIES)),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        costs=draw(
            st.sampled_from(
                [None, make_table(pair_us=draw(st.floats(0.0, 20.0)), score_ms=draw(SCORE_MS))]
            )
        ),
        score_tokens=draw(st.floats(0.0, 10.0)),
        target_s=draw(st.floats(1e-3, 6e-3)),
        drafter=None if accuracy is None else OracleDrafter(accuracy, VOCAB_SIZE),
        tiers=make_tiers(
            block_size,
            *draw(st.sampled_from(sizes)),
            num_per_step=draw(st.sampled_from([1, 4, 64])),
            policy=draw(st.sampled_from(list(StorePolicy))),
            stores_salted=draw(st.booleans()),
        ),
        num_lanes=num_lanes,
        hold_seed=draw(st.sampled_from([None, None, 1, 2, 3])),
    )


class AnyEngineMachine(EngineMachine):
    @initialize(engine=engines())
    def start(self, engine: SimulatedEngine) -> None:
        self.engine = engine


TestEngineMachine = AnyEngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), arrivals=st.lists(st.tuples(requests(), st.integers(0, 5)), max_size=10))
def test_tokens_are_those_of_a_request_alone(
    data: st.DataObject, arrivals: list[tuple[Request, int]]
) -> None:
    engine = data.draw(engines())
    lookahead = data.draw(st.booleans())
    for index, (request, num_steps) in enumerate(arrivals):
        engine.add(rename(request, f"r{index}"))
        for _ in range(num_steps):
            while engine.num_in_flight > lookahead * (engine.max_in_flight - 1):
                engine.land()
            engine.launch()
    while engine.num_in_flight > 1:
        engine.land()
    engine.run(lookahead=lookahead)
    engine.check_drained()


@pytest.mark.parametrize(
    ("total_blocks", "max_num_batched_tokens", "prefix_caching", "policy", "lookahead"),
    all_combinations((25, 60, 200), (8, 19, 512), (True, False), POLICIES, (False, True)),
)
def test_tokens_do_not_depend_on_memory_chunks_sharing_policy_or_lookahead(
    total_blocks: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    policy: SchedulingPolicy,
    lookahead: bool,
) -> None:
    engine = run_workload(
        lookahead=lookahead,
        total_blocks=total_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=policy,
        prefix_caching=prefix_caching,
    )
    assert engine.tokens == plain_tokens()
    assert all(
        ending.finish_reason in (FinishReason.stop, FinishReason.length)
        for ending in engine.endings.values()
    )


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("target_s", [0.001, 0.003, 0.004])
def test_tokens_do_not_depend_on_a_target_for_latency(target_s: float, lookahead: bool) -> None:
    """Any decode misses the first target; the other targets cut prompts into chunks."""
    free = run_workload(lookahead=lookahead, total_blocks=60, max_num_batched_tokens=512)
    bound = run_workload(
        lookahead=lookahead, total_blocks=60, max_num_batched_tokens=512, target_s=target_s
    )
    assert bound.tokens == free.tokens
    assert bound.num_steps > free.num_steps


def test_the_workload_meets_what_it_is_for() -> None:
    """Checks that the workloads above cause preemptions, prefix hits and evictions."""
    tight = run_workload(lookahead=True, total_blocks=25, max_num_batched_tokens=19)
    ample = run_workload(lookahead=True, total_blocks=200, max_num_batched_tokens=19)
    assert tight.scheduler.num_preemptions > 10
    assert tight.cache.num_evictions > 100
    assert tight.num_copies > 10
    assert ample.num_copies > 50
    # These preemptions are for rows only: a beam takes its row from a later arrival.
    assert ample.scheduler.num_preemptions < 5
    assert ample.cache.prefix_hits > 250  # prompts that are scored use no cached blocks
    assert tight.tokens == ample.tokens


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("total_blocks", [25, 200])
def test_tokens_do_not_depend_on_drafts(total_blocks: int, accuracy: float) -> None:
    engine = run_workload(
        lookahead=False, total_blocks=total_blocks, max_num_batched_tokens=19, accuracy=accuracy
    )
    assert engine.tokens == plain_tokens()
    assert engine.scheduler.drafts is not None
    drafts = engine.scheduler.drafts.stats
    assert drafts.num_draft_tokens > 100
    if accuracy in (0.0, 1.0):
        assert engine.num_right_drafts == accuracy * drafts.num_draft_tokens
    else:
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("accuracy", [None, 0.5])
@pytest.mark.parametrize("total_blocks", [25, 200])
def test_tokens_do_not_depend_on_rows_that_wait_for_their_masks(
    total_blocks: int, accuracy: float | None, lookahead: bool
) -> None:
    engine = run_workload(
        lookahead=lookahead,
        total_blocks=total_blocks,
        max_num_batched_tokens=19,
        accuracy=accuracy,
        hold_seed=1,
    )
    assert engine.tokens == plain_tokens()


@pytest.mark.parametrize("num_lanes", [2, 4])
@pytest.mark.parametrize("total_blocks", [25, 200])
def test_tokens_do_not_depend_on_the_lanes_of_a_pipeline(total_blocks: int, num_lanes: int) -> None:
    engine = run_workload(
        lookahead=True,
        total_blocks=total_blocks,
        max_num_batched_tokens=19,
        num_lanes=num_lanes,
    )
    assert engine.tokens == plain_tokens()


@settings(deadline=None)
@given(num_lanes=st.integers(2, 4), num_seqs=st.integers(1, 9), max_tokens=st.integers(4, 12))
def test_lanes_decode_equal_parts_in_turn(num_lanes: int, num_seqs: int, max_tokens: int) -> None:
    """While all sequences decode, their lengths differ by at most one token.

    Each lane that has sequences has a step in flight.
    """
    engine = SimulatedEngine(
        total_blocks=200,
        block_size=4,
        max_num_seqs=9,
        max_num_batched_tokens=64,
        max_model_len=40,
        num_lanes=num_lanes,
    )
    for index in range(num_seqs):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.add(
            Request(request_id=f"r{index}", prompt_token_ids=[index + 1, 2, 3], sampling=sampling)
        )
    engine.launch()
    engine.land()  # the prompts
    while not engine.endings:
        while engine.num_in_flight < num_lanes and engine.launch() is not None:
            pass
        share = -(-num_seqs // num_lanes)
        assert engine.num_in_flight == -(-num_seqs // share)
        lengths = sorted(len(tokens) for tokens in engine.tokens.values())
        assert lengths[-1] - lengths[0] <= 1
        engine.land()
    while engine.num_in_flight:
        engine.land()
    engine.run(lookahead=True)
    engine.check_drained()


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    engine = SimulatedEngine(
        total_blocks=50,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=40,
        num_lanes=3,
    )
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add(Request(request_id="r0", prompt_token_ids=list(range(21)), sampling=sampling))
    outputs = [engine.launch() for _ in range(3)]
    starts = [entry.start for output in outputs if output is not None for entry in output.scheduled]
    assert starts == [0, 8, 16]
    engine.land()
    assert engine.launch() is None, "the step needs a token that has not arrived"
    engine.run(lookahead=True)
    engine.check_drained()


def test_tokens_do_not_depend_on_drafts_beside_a_step_in_flight_and_a_target() -> None:
    """Only sequences without a step in flight get drafts, and only as many as the target allows."""
    engine = run_workload(
        lookahead=True,
        total_blocks=25,
        max_num_batched_tokens=19,
        accuracy=0.5,
        target_s=0.004,
    )
    assert engine.tokens == plain_tokens()


def test_right_drafts_save_steps() -> None:
    steps = [
        run_workload(
            lookahead=False, total_blocks=200, max_num_batched_tokens=64, accuracy=accuracy
        ).num_steps
        for accuracy in (0.0, 1.0)
    ]
    assert steps[1] < 0.7 * steps[0]


@pytest.mark.parametrize(("num_lanes", "lookahead"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("places", [(5, 0), (0, 400), (20, 60)])
def test_tokens_do_not_depend_on_slower_tiers(
    places: tuple[int, int], num_lanes: int, lookahead: bool
) -> None:
    tiered = run_workload(
        lookahead=lookahead,
        total_blocks=40,
        max_num_batched_tokens=19,
        tiers=make_tiers(4, *places),
        num_lanes=num_lanes,
    )
    assert (tiered.tokens, tiered.num_loaded_blocks > 0) == (plain_tokens(), True)
