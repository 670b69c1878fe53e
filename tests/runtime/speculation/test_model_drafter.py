"""The draft model's cache is right whatever is scheduled: a perfect model is always right."""

from __future__ import annotations

import random

import pytest

from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from tests.runtime.simulated_device import EOS, VOCAB_SIZE
from tests.runtime.simulated_engine import SimulatedEngine
from tests.runtime.speculation.draft_device import SimulatedDrafter

MAX_MODEL_LEN = 96
GROUPS = [
    (KVGroup(0, 3, 1), KVGroup(9, 1, 3)),  # more layers with a window than without
    (KVGroup(0, 1, 3), KVGroup(9, 3, 1)),
]


def run_workload(
    accuracy: float,
    *,
    total_blocks: int = 200,
    max_num_batched_tokens: int = 19,
    prefix_caching: bool = True,
    lookahead: bool = False,
    draft_model_len: int = MAX_MODEL_LEN,
    draft_num_tokens: int = 64,
    groups: tuple[KVGroup, ...] = WHOLE_CACHE,
) -> SimulatedEngine:
    """Forty requests that share beginnings; a third of them repeat an earlier prompt."""
    generator = random.Random(5)
    drafter = SimulatedDrafter(
        total_blocks=total_blocks,
        block_size=4,
        accuracy=accuracy,
        max_model_len=draft_model_len,
        max_num_tokens=draft_num_tokens,
        groups=groups,
    )
    engine = SimulatedEngine(
        total_blocks=total_blocks,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=prefix_caching,
        drafter=drafter,
        groups=groups,
    )
    stems = [[generator.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(3)]
    prompts: list[list[int]] = []
    for index in range(40):
        prompt = generator.choice(stems)[: generator.randint(1, 60 if index % 3 else 12)]
        prompts.append(generator.choice(prompts) if index % 3 == 2 else prompt)
        sampling = SamplingParams(
            max_tokens=generator.randint(1, 30),
            ignore_eos=index % 4 != 0,
            speculation=index % 6 != 0,
        )
        if index % 9 == 4:
            sampling = SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6)
        engine.add(
            Request(
                request_id=str(index),
                prompt_token_ids=prompts[-1],
                sampling=sampling,
                eos_token_ids=(EOS,),
                cache_salt="tenant" if index % 8 == 0 else "",
            )
        )
        while engine.num_in_flight > lookahead:
            engine.land()
        engine.launch()
    while engine.num_in_flight > 1:
        engine.land()
    engine.run(lookahead=lookahead)
    engine.check_drained()  # every output is that of the request alone
    return engine


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("total_blocks", [25, 60, 200])
def test_a_perfect_draft_model_is_always_right(
    total_blocks: int, prefix_caching: bool, lookahead: bool
) -> None:
    """After prefix hits, preemptions, chunks and reused blocks, the model's entries are right."""
    engine = run_workload(
        1.0, total_blocks=total_blocks, prefix_caching=prefix_caching, lookahead=lookahead
    )
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    assert stats.num_draft_tokens > 50
    assert engine.num_right_drafts == stats.num_draft_tokens
    if total_blocks == 25:
        assert engine.scheduler.num_preemptions > 5


@pytest.mark.parametrize("total_blocks", [25, 200])
@pytest.mark.parametrize("accuracy", [0.0, 0.6])
def test_refused_drafts_leave_no_trace(accuracy: float, total_blocks: int) -> None:
    """A draft is right as often as the device leaves a token unaltered."""
    engine = run_workload(accuracy, total_blocks=total_blocks)
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    if not accuracy:
        assert stats.num_draft_tokens > 100
        assert engine.num_right_drafts == 0
        return
    # Tokens that were compared: the accepted ones and the first refused one of each draft.
    num_full = stats.accepted_per_position[-1]
    compared = stats.num_accepted_tokens + stats.num_drafts - num_full
    assert isinstance(engine.drafter, SimulatedDrafter)
    device = engine.drafter.device
    expected = device.num_unaltered / device.num_drawn
    assert stats.num_accepted_tokens / compared == pytest.approx(expected, abs=0.1)


def test_cached_prompts_are_not_computed_again() -> None:
    cached, plain = (
        run_workload(1.0, prefix_caching=on, max_num_batched_tokens=96) for on in (True, False)
    )
    assert isinstance(cached.drafter, SimulatedDrafter)
    assert isinstance(plain.drafter, SimulatedDrafter)
    assert cached.drafter.device.num_tokens < 0.8 * plain.drafter.device.num_tokens


@pytest.mark.parametrize("draft_num_tokens", [8, 16])
def test_a_small_step_catches_up_in_chunks(draft_num_tokens: int) -> None:
    engine = run_workload(1.0, draft_num_tokens=draft_num_tokens)
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    assert 50 < stats.num_draft_tokens == engine.num_right_drafts


def test_nothing_is_drafted_past_the_draft_models_context() -> None:
    engine = run_workload(1.0, draft_model_len=24)
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    assert isinstance(engine.drafter, SimulatedDrafter)
    assert 20 < stats.num_draft_tokens == engine.num_right_drafts
    tables = [row.tables[0] for row in engine.drafter.device.rows.values()]
    assert max(map(len, tables)) == 24 // 4


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("total_blocks", [60, 200])
def test_a_draft_model_beside_a_model_with_windows(
    total_blocks: int, groups: tuple[KVGroup, ...]
) -> None:
    engine = run_workload(1.0, total_blocks=total_blocks, groups=groups, lookahead=True)
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    assert 100 < stats.num_draft_tokens == engine.num_right_drafts
