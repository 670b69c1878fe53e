"""Drafts in the simulator: their gain, and the time that a draft model takes."""

from __future__ import annotations

import pytest

from ostinato.benchmarks.load.job import JobRequest, LoadJob
from ostinato.benchmarks.simulate.jobs import simulate_job
from ostinato.benchmarks.simulate.simulated_drafts import DraftSpec
from ostinato.runtime.costs.step_limits import StepLimits
from tests.benchmarks.simulate.simulations import make_spec
from tests.runtime.cost_tables import make_table


def duration(drafts: DraftSpec | None, *, count: int = 1) -> float:
    """Seconds until requests of 30 prompt tokens and 41 output tokens each have ended."""
    requests = [
        JobRequest(prompt=[100 * key + place for place in range(30)], max_tokens=41, at_s=0.0)
        for key in range(count)
    ]
    changes = {"upper": StepLimits(8, 64, 4)} if drafts else {}
    results = simulate_job(
        make_spec(drafts=drafts, **changes), LoadJob(url="", model="", requests=requests)
    )
    assert list(results.num_output) == [41] * count
    return max(results.last_s)


def test_right_drafts_by_hand():
    """After the step of the prompt, ten steps give four tokens each."""
    spec = DraftSpec(max_drafts=3, acceptance=1.0, adaptive=False)
    table = make_table()
    steps = [
        table.decode_seconds(1, start) + table.verify_surcharge(1, 3) for start in range(30, 70, 4)
    ]
    assert duration(spec) == pytest.approx(table.step_seconds(30, 1, 0) + sum(steps), rel=1e-3)


@pytest.mark.parametrize("count", [1, 4])
def test_the_simulated_number_of_drafts_follows_their_worth(count: int):
    plain = duration(None, count=count)
    right, half, wrong = (
        duration(DraftSpec(max_drafts=3, acceptance=chance), count=count)
        for chance in (1.0, 0.5, 0.0)
    )
    assert right < 0.6 * plain
    assert right < half < plain
    assert plain <= wrong < 1.15 * plain


def test_a_simulated_draft_model_takes_time():
    plain = duration(None)
    cheap, costly = (
        duration(
            DraftSpec(
                max_drafts=3,
                acceptance=0.9,
                model_costs=make_table(step_ms=step_ms, token_ms=step_ms / 20),
            )
        )
        for step_ms in (0.1, 4.0)
    )
    free = duration(DraftSpec(max_drafts=3, acceptance=0.9))
    assert free < cheap < 0.7 * plain
    assert plain < costly < 1.5 * plain
