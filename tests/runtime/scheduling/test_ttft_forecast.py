"""Predicted time to first token: literals for simple loads; it never falls as the queue grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.itl_bound import ItlBound
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.scheduling.ttft_forecast import QueueLoad, predict_ttft
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult
from tests.runtime.cost_tables import make_table, tables

# 2 ms a step, 0.1 ms a token, 0.05 ms a sequence, 1 us a pair: a token and a token of its context.
TABLE = make_table()
LIMITS = StepLimits(4, 64)
IDLE = QueueLoad(0, 0.0, 0, 0, 0, 4, [])


def ttft_ms(load: QueueLoad, num_prompt_tokens: int, bound: ItlBound | None = None) -> float:
    return 1e3 * predict_ttft(load, num_prompt_tokens, costs=TABLE, limits=LIMITS, bound=bound)


def test_an_idle_engine_computes_the_prompt() -> None:
    assert ttft_ms(IDLE, 10) == pytest.approx(2.0 + 1.0 + 0.05)
    assert ttft_ms(IDLE, 64 + 6) == pytest.approx((2.0 + 6.4 + 0.05) + (2.0 + 0.6 + 0.05))


def test_prompts_ahead_come_first() -> None:
    load = IDLE._replace(num_prefill_tokens=30, num_waiting=1, num_waiting_tokens=24)
    assert ttft_ms(load, 10) == ttft_ms(IDLE, 64)


def test_decodes_take_their_share_of_each_step() -> None:
    load = IDLE._replace(num_decodes=2, context=8.0, num_free_rows=2, expected_steps=[50, 50])
    # 62 tokens of prompts beside 2 decodes: 64 tokens, 3 sequences, 16 pairs.
    assert ttft_ms(load, 62) == pytest.approx(2.0 + 6.4 + 0.15 + 0.016)
    # A target of 4 ms allows 16 prompt tokens a step: `2 + 0.2 + 0.15 + 0.016 + 16 * 0.1` ms.
    bound = ItlBound(TABLE, 4e-3, least_chunk=4)
    assert ttft_ms(load, 32, bound) == pytest.approx(2 * (2.0 + 1.8 + 0.15 + 0.016))


def test_without_a_row_it_waits_until_one_ends() -> None:
    load = QueueLoad(4, 0.0, 0, 0, 0, 0, [9, 30, 20, 40])
    step = 2.0 + 4 * 0.15
    # The step that computes the prompt is one of the 9.
    assert ttft_ms(load, 10) == pytest.approx(8 * step + (2.0 + 1.4 + 0.25))
    # The third request in the queue takes the third row that becomes free.
    load = load._replace(num_waiting=2, num_waiting_tokens=10)
    assert ttft_ms(load, 10) == pytest.approx(29 * step + (2.0 + 2.4 + 0.25))


LOADS = st.builds(
    QueueLoad,
    num_decodes=st.integers(0, 4),
    context=st.floats(0.0, 200.0),
    num_prefill_tokens=st.integers(0, 500),
    num_waiting=st.integers(0, 20),
    num_waiting_tokens=st.integers(0, 2000),
    num_free_rows=st.integers(0, 4),
    expected_steps=st.lists(st.integers(1, 100), max_size=4),
)


@given(LOADS, st.integers(0, 300), st.integers(1, 200), st.integers(1, 300), st.booleans())
def test_it_never_falls_when_the_queue_or_the_prompt_grows(
    load: QueueLoad, num_prompt_tokens: int, more: int, own_more: int, has_target: bool
) -> None:
    bound = ItlBound(TABLE, 4e-3, least_chunk=4) if has_target else None
    now = ttft_ms(load, num_prompt_tokens, bound)
    longer = load._replace(
        num_waiting=load.num_waiting + 1, num_waiting_tokens=load.num_waiting_tokens + more
    )
    assert ttft_ms(longer, num_prompt_tokens, bound) >= now - 1e-9
    assert ttft_ms(load, num_prompt_tokens + own_more, bound) >= now - 1e-9


@given(tables(), LOADS, st.integers(0, 300))
def test_it_is_a_time(table: CostTable, load: QueueLoad, num_prompt_tokens: int) -> None:
    assert predict_ttft(load, num_prompt_tokens, costs=table, limits=LIMITS) >= 0.0


def test_the_schedulers_load() -> None:
    scheduler = Scheduler(
        SchedulerConfig(), KVCacheManager(200, 4), max_model_len=100, limits=StepLimits(2, 16)
    )

    def add(name: str, num_tokens: int, max_tokens: int) -> None:
        prompt = [ord(name)] * num_tokens
        sampling = SamplingParams(max_tokens=max_tokens)
        scheduler.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))

    assert scheduler.load() == QueueLoad(0, 0.0, 0, 0, 0, 2, [])
    add("a", 5, 10)
    add("b", 20, 3)
    add("c", 7, 4)
    assert scheduler.load() == QueueLoad(0, 0.0, 0, 3, 32, 2, [])
    for tokens in ([1], [2, 2]):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(output, StepResult(tokens))
    # "a" has 2 of its 10 tokens and 6 cached, "b" 1 of 3 and 20 cached; "c" lacks a row.
    assert scheduler.load() == QueueLoad(2, 13.0, 0, 1, 7, 0, [8, 2])
    for _ in range(2):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(output, StepResult([3, 3]))
    # "b" has ended with 3 tokens, so the forecast assumes the same length for the others.
    assert scheduler.load() == QueueLoad(1, 8.0, 0, 1, 7, 1, [1])
