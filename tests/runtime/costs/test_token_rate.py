"""The size of an encoder's next step follows the time that its earlier steps took."""

from __future__ import annotations

import pytest

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.costs.token_rate import TokenRate
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.startup.calibrate import make_scheduler
from ostinato.runtime.types.params import PoolingParams, SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult

LIMITS = StepLimits(64, 2048)


def scheduler_of(config: SchedulerConfig, text_step_s: float | None = 0.04) -> Scheduler:
    cache = KVCacheManager(1000, 16, enable_prefix_caching=False)
    return make_scheduler(
        config, cache, 512, LIMITS, None, whole_prompts=True, max_in_flight=1,
        text_step_s=text_step_s,
    )  # fmt: skip


def text(name: str, num_tokens: int, place: int = 0) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[5] * num_tokens,
        sampling=SamplingParams(max_tokens=1),
        pooling=PoolingParams(),
        place=place,
    )


def run_step(scheduler: Scheduler, seconds_per_token: float) -> list[str]:
    """Run a step with this time per token; returns the texts that it computed."""
    output = scheduler.schedule()
    assert output is not None
    assert output.num_tokens == sum(entry.num_new_tokens for entry in output.scheduled)
    result = StepResult([], pooled=[b"v"] * output.num_pooled)
    ended = scheduler.update(output, result)
    scheduler.observe(output.num_tokens * seconds_per_token)
    scheduler.check_integrity()
    return [one.request_id for one in ended]


def test_the_rate_is_a_moving_average() -> None:
    rate = TokenRate(0.04)
    assert rate.max_num_tokens == 256
    rate.observe(63, 1.0)  # too few tokens: ignored
    assert rate.max_num_tokens == 256
    rate.observe(100, 0.01)
    assert rate.max_num_tokens == 400
    rate.observe(100, 0.03)
    assert rate.max_num_tokens == pytest.approx(0.04 / 1.5e-4, abs=1)
    for _ in range(50):
        rate.observe(100, 1.0)
    assert rate.max_num_tokens == 64


def test_a_step_takes_the_texts_that_fit_into_the_time() -> None:
    scheduler = scheduler_of(SchedulerConfig())
    for place in range(40):
        scheduler.add(text(f"large:{place}", 64, place))
    assert len(run_step(scheduler, 2e-4)) == 4  # 256 tokens, before a step was measured
    assert len(run_step(scheduler, 2e-4)) == 3  # 200 tokens take 40 ms
    scheduler.add(text("new", 5))
    assert "new" in run_step(scheduler, 2e-4)  # the next step has the text of another client
    sizes: list[int] = []
    while scheduler.has_work:
        sizes.append(len(run_step(scheduler, 1e-5)))
    assert sum(sizes) == 40 + 1 - 4 - 3 - 4
    assert sizes[0] < sizes[1] < sizes[2]  # steps grow as soon as tokens take less time


def test_a_text_that_takes_longer_than_the_time_has_a_step_of_its_own() -> None:
    scheduler = scheduler_of(SchedulerConfig())
    for name in ("a", "b"):
        scheduler.add(text(name, 511))
    scheduler.add(text("short", 4))
    assert [run_step(scheduler, 1.0) for _ in range(3)] == [["a"], ["b"], ["short"]]
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("config", "text_step_s"),
    [(SchedulerConfig(), None), (SchedulerConfig(max_num_batched_tokens=2048), 0.04)],
)
def test_without_a_time_or_with_a_set_limit_steps_are_as_large_as_they_may(
    config: SchedulerConfig, text_step_s: float | None
) -> None:
    scheduler = scheduler_of(config, text_step_s)
    for place in range(40):
        scheduler.add(text(f"large:{place}", 64, place))
    assert len(run_step(scheduler, 1.0)) == 32
