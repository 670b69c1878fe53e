"""The head's cache is right whatever is scheduled, so all drafts of a perfect head are right."""

from __future__ import annotations

import random

import pytest
import torch

from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.execution.hidden_state_pool import HiddenStatePool
from ostinato.runtime.execution.hidden_states import HiddenStates, KeptStates
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from tests.runtime.simulated_device import EOS, VOCAB_SIZE
from tests.runtime.simulated_engine import SimulatedEngine
from tests.runtime.speculation.head_device import SimulatedHeadDrafter, TappedDevice

MAX_MODEL_LEN = 96
GROUPS = [
    (KVGroup(0, 3, 1), KVGroup(9, 1, 3)),  # more layers with a window than without
    (KVGroup(0, 1, 3), KVGroup(9, 3, 1)),
]


def run_workload(
    *,
    total_blocks: int = 200,
    max_num_batched_tokens: int = 19,
    prefix_caching: bool = True,
    lookahead: bool = False,
    head_model_len: int = MAX_MODEL_LEN,
    head_num_tokens: int = 64,
    seed: int = 5,
    states: KeptStates | None = None,
    groups: tuple[KVGroup, ...] = WHOLE_CACHE,
) -> tuple[SimulatedEngine, SimulatedHeadDrafter]:
    """Sixty requests that share beginnings; a third of them continue an earlier text."""
    generator = random.Random(seed)
    drafter = SimulatedHeadDrafter(
        block_size=4,
        max_model_len=head_model_len,
        max_num_tokens=head_num_tokens,
        states=states or HiddenStates(),
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
    engine.device = TappedDevice(total_blocks, 4, drafter.simulated, groups)
    stems = [[generator.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(3)]
    for index in range(60):
        prompt = generator.choice(stems)[: generator.randint(1, 60 if index % 3 else 12)]
        ended = [name for name in engine.endings if engine.tokens[name]]
        if index % 3 == 2 and ended:
            name = generator.choice(ended)
            before = engine.requests[name].prompt_token_ids + engine.tokens[name]
            prompt = [*before, 3][: MAX_MODEL_LEN - 10]
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
                prompt_token_ids=prompt,
                sampling=sampling,
                eos_token_ids=(EOS,),
                cache_salt="tenant" if index % 8 == 0 else "",
            )
        )
        while engine.num_in_flight > lookahead:
            engine.land()
        engine.launch()
        if index % 13 == 12:
            engine.abort(str(index - 1))
    while engine.num_in_flight > 1:
        engine.land()
    engine.run(lookahead=lookahead)
    engine.check_drained()  # every output is that of the request alone
    return engine, drafter


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("total_blocks", [25, 60, 200])
def test_a_perfect_head_is_always_right(
    total_blocks: int, prefix_caching: bool, lookahead: bool
) -> None:
    """After prefix hits, preemptions, chunks and reused blocks, the head's entries are right."""
    engine, _ = run_workload(
        total_blocks=total_blocks, prefix_caching=prefix_caching, lookahead=lookahead
    )
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    assert stats.num_draft_tokens > 100
    assert engine.num_right_drafts == stats.num_draft_tokens
    if total_blocks == 25:
        assert engine.scheduler.num_preemptions > 5


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize(("num_slots", "least"), [(8 * 24 + 19, 300), (60, 100)])
def test_a_pool_of_hidden_states_gives_right_ones_or_none(
    num_slots: int, least: int, lookahead: bool
) -> None:
    """With few slots, states are dropped and the head begins later, with less context."""
    pool = HiddenStatePool(num_slots, 1, torch.int64, torch.device("cpu"))
    engine, drafter = run_workload(total_blocks=60, lookahead=lookahead, states=pool)
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    assert least < stats.num_draft_tokens == engine.num_right_drafts
    for row in range(8):
        drafter.simulated.unwatch(row)
    assert sorted(pool._free) == list(range(num_slots))


@pytest.mark.parametrize("head_num_tokens", [8, 16])
@pytest.mark.parametrize("max_num_batched_tokens", [19, 96])
def test_a_small_step_catches_up_in_chunks(
    head_num_tokens: int, max_num_batched_tokens: int
) -> None:
    engine, _ = run_workload(
        head_num_tokens=head_num_tokens, max_num_batched_tokens=max_num_batched_tokens
    )
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    assert 50 < stats.num_draft_tokens == engine.num_right_drafts


def test_cached_prompts_are_not_computed_again() -> None:
    cached, plain = (
        run_workload(prefix_caching=on, max_num_batched_tokens=96)[1].simulated
        for on in (True, False)
    )
    assert cached.num_tokens < 0.8 * plain.num_tokens
    assert cached.longest > 60


def test_nothing_is_drafted_past_the_heads_context() -> None:
    engine, drafter = run_workload(head_model_len=24)
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    assert 20 < stats.num_draft_tokens == engine.num_right_drafts
    assert drafter.simulated.longest == 24


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("total_blocks", [60, 200])
def test_a_head_of_a_model_with_windows(total_blocks: int, groups: tuple[KVGroup, ...]) -> None:
    """After a prefix hit that ends within a block, the head begins at the next block."""
    engine, _ = run_workload(total_blocks=total_blocks, groups=groups, lookahead=True)
    assert engine.scheduler.drafts is not None
    stats = engine.scheduler.drafts.stats
    assert 100 < stats.num_draft_tokens == engine.num_right_drafts
