"""Fast-forward against single steps: equal figures and blocks; no leap past a sequence's end."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.benchmarks.report.statistics import percentile
from ostinato.benchmarks.simulate.fast_forward import FastForwardScheduler
from ostinato.benchmarks.simulate.fleet import simulate_open
from ostinato.conf.schema import SchedulerConfig, SchedulingPolicy
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult
from tests.benchmarks.simulate.simulations import make_spec, random_traffic, rows

GROUPS = (
    WHOLE_CACHE,
    (KVGroup(20),),
    (KVGroup(0, units=4, pieces=1), KVGroup(20, units=1, pieces=4)),
    (KVGroup(0, units=1, pieces=2), KVGroup(9, units=2, pieces=1)),
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    rate=st.sampled_from([5.0, 40.0, 400.0]),
    blocks=st.sampled_from([33, 50, 129]),
    shared=st.sampled_from([0, 40]),
    overlap=st.booleans(),
    policy=st.sampled_from(list(SchedulingPolicy)),
    target=st.sampled_from([None, 4.0]),
    groups=st.sampled_from(GROUPS),
)
def test_leaps_give_what_single_steps_give(
    seed, rate, blocks, shared, overlap, policy, target, groups
):
    spec = make_spec(
        num_blocks=blocks,
        groups=groups,
        max_model_len=152,
        overlap=overlap,
        scheduler=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, policy=policy, itl_target_ms=target
        ),
    )
    traffic = partial(random_traffic, seed, 40, rate, shared=shared)
    fast, slow = (
        simulate_open(spec, traffic, fast_forward=fast_forward) for fast_forward in (True, False)
    )
    assert fast.num_ended == 40
    assert fast.counters == slow.counters
    assert fast.num_steps == slow.num_steps
    assert rows(fast) == pytest.approx(rows(slow), rel=1e-9, abs=1e-9)
    assert sum(fast.gaps[1]) == sum(slow.gaps[1])
    for share in (0.5, 0.99):
        ours, stepwise = (
            percentile(gaps, 100 * share, counts) for gaps, counts in (fast.gaps, slow.gaps)
        )
        assert ours == pytest.approx(stepwise, rel=0.02)


def drive(scheduler: FastForwardScheduler, count: int) -> None:
    """Runs `count` steps. Each sequence in a step gets a token."""
    for _ in range(count):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(output, StepResult([9] * len(output.scheduled)))


@pytest.mark.parametrize("groups", GROUPS)
def test_fast_forward_leaves_the_same_blocks(groups: tuple[KVGroup, ...]):
    tables = []
    for fast_forward in (True, False):
        spec = make_spec(groups=groups)
        cache = spec.cache()
        scheduler = FastForwardScheduler(
            spec.scheduler, cache, max_model_len=256, limits=spec.limits
        )
        for key, length in enumerate((3, 8, 15, 30)):
            prompt = list(range(100 * key, 100 * key + length))
            sampling = SamplingParams(max_tokens=80, ignore_eos=True)
            scheduler.add(Request(request_id=str(key), prompt_token_ids=prompt, sampling=sampling))
        drive(scheduler, 2)
        assert scheduler.num_equal_steps(10) == 10
        assert scheduler.num_equal_steps(1000) == 78 - 1
        if fast_forward:
            scheduler.fast_forward(41, 9)
        else:
            drive(scheduler, 41)
        scheduler.check_integrity()
        output = scheduler.schedule()
        assert output is not None
        tables.append(
            (
                [
                    (entry.row, entry.start, entry.new_block_ids, entry.new_window_block_ids)
                    for entry in output.scheduled
                ],
                [
                    [(group.ids[:], group.num_freed) for group in sequence.block_table.groups]
                    for sequence in scheduler.queues.running
                ],
                [list(sequence.block_table.hashes) for sequence in scheduler.queues.running],
                cache._pool.free_block_ids(),
                scheduler.num_output_tokens,
            )
        )
    assert tables[0] == tables[1]


def test_no_fast_forward_over_the_end_of_a_sequence():
    spec = make_spec(num_blocks=33, max_model_len=128)
    scheduler = FastForwardScheduler(
        spec.scheduler, spec.cache(), max_model_len=128, limits=spec.limits
    )
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    scheduler.add(Request(request_id="a", prompt_token_ids=[1, 2], sampling=sampling))
    drive(scheduler, 1)
    assert scheduler.num_equal_steps(100) == 3  # the fifth token ends it
    drive(scheduler, 3)
    assert scheduler.num_equal_steps(100) == 0
