"""A fixed workload of forty requests, on the simulated engine."""

from __future__ import annotations

import random
from functools import cache

from ostinato.conf.schema import SchedulingPolicy
from ostinato.runtime.kv.tier_index import TierIndex
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from tests.runtime.cost_tables import make_table
from tests.runtime.drafters import OracleDrafter
from tests.runtime.simulated_device import EOS, VOCAB_SIZE
from tests.runtime.simulated_engine import SimulatedEngine


def run_workload(
    *,
    lookahead: bool,
    total_blocks: int,
    max_num_batched_tokens: int,
    policy: SchedulingPolicy = SchedulingPolicy.fcfs,
    prefix_caching: bool = True,
    target_s: float | None = None,
    accuracy: float | None = None,
    tiers: TierIndex | None = None,
    hold_seed: int | None = None,
    num_lanes: int = 1,
    num_states: int = 0,
    block_size: int = 4,
) -> SimulatedEngine:
    """Forty requests of mixed lengths that share beginnings, arriving over time."""
    generator = random.Random(11)
    engine = SimulatedEngine(
        total_blocks=total_blocks,
        block_size=block_size,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=96,
        policy=policy,
        prefix_caching=prefix_caching,
        costs=None if target_s is None else make_table(),
        target_s=target_s or 0.0,
        drafter=None if accuracy is None else OracleDrafter(accuracy, VOCAB_SIZE),
        tiers=tiers,
        hold_seed=hold_seed,
        num_lanes=num_lanes,
        num_states=num_states,
    )
    stems = [[generator.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(4)]
    for index in range(40):
        prompt = generator.choice(stems)[: generator.randint(1, 60 if index % 3 == 0 else 12)]
        sampling = SamplingParams(
            max_tokens=generator.randint(1, 60),
            ignore_eos=index % 4 != 0,
            prompt_logprobs=0 if index % 5 == 0 else None,
        )
        if index % 7 == 3:
            sampling = SamplingParams(
                use_beam_search=True, n=2, best_of=4, max_tokens=20, early_stopping="never"
            )
        request = Request(
            request_id=str(index),
            prompt_token_ids=[*prompt, generator.randrange(VOCAB_SIZE)],
            sampling=sampling,
            eos_token_ids=(EOS,),
            priority=generator.randrange(3),
            cache_salt="tenant" if index % 8 == 0 else "",
        )
        engine.add(request)
        while engine.num_in_flight > lookahead * (engine.max_in_flight - 1):
            engine.land()
        engine.launch()
    while engine.num_in_flight > 1:
        engine.land()
    engine.run(lookahead=lookahead)
    engine.check_drained()
    return engine


@cache
def plain_tokens() -> dict[str, list[int]]:
    """The workload's outputs without drafts, tiers or shortages."""
    return run_workload(lookahead=False, total_blocks=200, max_num_batched_tokens=19).tokens
