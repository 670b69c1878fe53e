"""Fits of serving overhead: to recordings drawn from known distributions, and to a real server."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from ostinato.benchmarks.load.job import JobRequest, LoadJob, LoadReport, RequestTimes
from ostinato.benchmarks.load.run import find_target
from ostinato.benchmarks.load.server_process import Server
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.specs import measured_spec
from ostinato.benchmarks.simulate.step_times.fit import EngineStep, Recording, fit_overheads
from ostinato.benchmarks.simulate.step_times.step_noise import NoiseSampler, SeenStep, fit_ratios
from ostinato.benchmarks.simulate.validation.calibration_traffic import (
    Calibration,
    recording_server,
)
from ostinato.conf.compose import load_config
from ostinato.runtime.costs.cost_table import Chunk, CostTable
from tests.runtime.cost_tables import make_table

TABLE = make_table()
BEGAN_AT = 1000.0


@dataclasses.dataclass
class Truth:
    """Overheads of the simulated server."""

    decode: float = 1.3
    prompt: float = 1.8
    pause_s: float = 0.0004
    request_s: float = 0.003
    delivery_s: float = 0.0015
    spread: float = 0.0  # the ratio of a step varies by up to this share


def record(truth: Truth, *, seed: int = 0, num_requests: int = 60) -> Recording:
    """A recording of requests in pairs. The second of a pair is sent while the first runs.

    Each request has a prompt of its own length and eight output tokens.
    """
    numbers = random.Random(seed)
    steps: list[EngineStep] = []
    requests: list[JobRequest] = []
    times: list[RequestTimes] = []
    now = BEGAN_AT

    def step(entries: list[tuple[str, int, int]]) -> float:
        nonlocal now
        chunks = [Chunk(tokens, start) for _, start, tokens in entries if tokens > 1]
        contexts = [start for _, start, tokens in entries if tokens == 1]
        seconds = TABLE.mixed_seconds(len(contexts), float(np.mean(contexts or [0])), chunks)
        ratio = truth.prompt if chunks else truth.decode
        seconds *= ratio * (1 + truth.spread * numbers.uniform(-1, 1))
        num_tokens = sum(tokens for _, _, tokens in entries)
        steps.append(EngineStep(now, seconds, num_tokens, len(entries), len(contexts), 0, entries))
        now += seconds
        return now

    for pair in range(num_requests // 2):
        now += 0.5  # the engine is idle
        names = [f"r{2 * pair + place}" for place in range(2)]
        lengths = [numbers.randrange(20, 300) for _ in names]
        sent = [now - BEGAN_AT - truth.request_s, 0.0]
        ends: list[list[float]] = [[step([(f"{names[0]}#1", 0, lengths[0])])], []]
        for number in range(3):
            now += truth.pause_s
            ends[0].append(step([(f"{names[0]}#1", lengths[0] + number, 1)]))
        # The second request arrives just after the third decode step has begun: too late to join
        # this step.
        sent[1] = steps[-1].began_at + 1e-6 - truth.request_s - BEGAN_AT
        for number in range(3, 7):
            now += truth.pause_s
            first = (f"{names[0]}#1", lengths[0] + number, 1)
            place = number - 3
            second = (f"{names[1]}#2", lengths[1] + place - 1 if place else 0, 1)
            if not place:
                second = (f"{names[1]}#2", 0, lengths[1])
            end = step([first, second])
            ends[0].append(end)
            ends[1].append(end)
        for number in range(3, 7):
            now += truth.pause_s
            ends[1].append(step([(f"{names[1]}#2", lengths[1] + number, 1)]))
        for name, length, at, its in zip(names, lengths, sent, ends, strict=True):
            requests.append(JobRequest(prompt=[1] * length, max_tokens=8))
            pieces = [end + truth.delivery_s - BEGAN_AT for end in its]
            times.append(
                RequestTimes(
                    status="ok",
                    intended_s=at,
                    end_s=pieces[-1] + 0.0001,
                    chunk_s=pieces,
                    num_output_tokens=8,
                    request_id=name,
                )
            )
    job = LoadJob(url="", model="", requests=requests)
    report = LoadReport(
        requests=times,
        began_at=BEGAN_AT,
        duration_s=now - BEGAN_AT,
        loop_lag_ms={},
        send_lag_ms={},
        cpu_share=0.0,
    )
    return Recording(job, report, steps)


def test_the_fit_finds_what_the_server_does():
    truth = Truth()
    overheads = fit_overheads(TABLE, [record(truth)])
    for found, ratio in ((overheads.decode, truth.decode), (overheads.prompt, truth.prompt)):
        for tokens, decodes in ((20, 0), (100, 1), (300, 2)):
            assert found.usual(tokens, decodes) == pytest.approx(ratio, rel=1e-3)
        assert found.spread == pytest.approx([1.0] * len(found.spread), rel=1e-3)
    assert overheads.pause_s == pytest.approx([truth.pause_s] * len(overheads.pause_s), abs=1e-6)
    idle = overheads.idle_request_s
    assert idle == pytest.approx([truth.request_s] * len(idle), abs=1e-6)
    delays = [delay for one in overheads.delivery_s for delay in one]
    assert delays == pytest.approx([truth.delivery_s] * len(delays), abs=1e-6)
    assert overheads.end_s == pytest.approx([0.0001] * len(overheads.end_s), abs=1e-6)
    # For a busy engine only bounds are known: the request arrived after the beginning of the step
    # that it missed, and before the beginning of its first step.
    [busy] = overheads.busy_request_s
    assert truth.request_s - 2e-6 <= min(busy.values)
    assert max(busy.values) < truth.request_s + TABLE.decode_seconds(1, 400) * truth.decode * 1.5


def test_disturbances_are_kept_as_they_were():
    ratios = fit_overheads(TABLE, [record(Truth(spread=0.5))]).decode
    assert ratios.usual(0, 1) == pytest.approx(1.3, rel=0.1)
    assert np.median(ratios.spread) == pytest.approx(1.0, rel=0.1)
    assert min(ratios.spread) < 0.7
    assert max(ratios.spread) > 1.35


def test_slow_moments_stay_together():
    recordings = [record(Truth(decode=1.3 * by), seed=by) for by in (1, 1, 1, 2)]
    overheads = fit_overheads(TABLE, recordings)
    noise = NoiseSampler((overheads.decode, overheads.prompt), random.Random(0))
    drawn = [noise.next(0) > 1.5 for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(0.25, abs=0.1)
    changes = sum(a != b for a, b in pairwise(drawn))
    # Of independent draws, three of eight would differ from the one before.
    assert changes < len(drawn) / 50


def test_a_point_of_the_table_that_was_disturbed_is_put_right():
    places = (1, 16, 64, 256)
    true = CostTable(
        tokens=places,
        seqs=(1, 2),
        contexts=(0,),
        seconds=tuple(s for n in places for s in (n * 1e-4 + 2e-3,) * 2),
        decode=(2e-3, 2e-3),
    )
    seconds = list(true.seconds)
    for place in (4, 5, 6, 7):
        seconds[place] *= 1.5
    wrong = msgspec.structs.replace(true, seconds=tuple(seconds))
    numbers = random.Random(0)
    steps: list[SeenStep] = []
    for number in range(400):
        tokens, decodes = numbers.randrange(16, 256), numbers.randrange(2)
        ratio = true.step_seconds(tokens, 1 + decodes, 0) / wrong.step_seconds(
            tokens, 1 + decodes, 0
        )
        steps.append(SeenStep(number, tokens, decodes, ratio * numbers.uniform(0.95, 1.05)))
    found = fit_ratios(steps)
    for tokens, ratio in ((64, 1 / 1.5), (128, 1 / 1.5), (16, 1.0)):
        assert found.usual(tokens, 1) == pytest.approx(ratio, rel=0.1), tokens
    assert max(found.spread) < 1.25


def test_numbers_that_were_never_seen_are_those_nearest():
    ratios = fit_ratios([SeenStep(n, 64 << n % 2, n % 3, 2.0) for n in range(60)])
    for tokens, decodes in ((1, 0), (80, 1), (10_000, 64)):
        assert ratios.usual(tokens, decodes) == pytest.approx(2.0)
    alone = fit_ratios([SeenStep(0, 0, 3, 1.25)])
    assert alone.usual(0, 30) == pytest.approx(1.25)


def test_too_little_is_refused():
    short = record(Truth(), num_requests=2)
    with pytest.raises(
        ValueError, match="at least 20 steps, some with prompts and some without; it has"
    ):
        fit_overheads(TABLE, [short])
    unanswered = record(Truth())
    for one in unanswered.report.requests:
        one.status = "stalled"
    with pytest.raises(ValueError, match="needs answered requests"):
        fit_overheads(TABLE, [unanswered])


@pytest.mark.slow
def test_a_calibration_of_a_real_server():
    config = load_config(["model.max_model_len=512", "cache.memory_gib=0.05"])
    spec: EngineSpec = measured_spec(config)
    with Server(recording_server(config)) as server:
        target, _ = find_target(server.url, config.load, is_ours=True)
        calibration = Calibration(target, 512, spec)
        recordings = [calibration.run() for _ in range(2)]
    closed, rising = recordings
    assert closed.job.concurrency
    assert rising.job.concurrency is None
    for one in recordings:
        assert all(times.status == "ok" for times in one.report.requests)
        named = {request_id.partition("#")[0] for s in one.steps for request_id, _, _ in s.entries}
        sent = {times.request_id for times in one.report.requests}
        assert len(sent & named) > len(sent) / 2  # a step names the first 24 of its sequences
    overheads = fit_overheads(spec.costs, recordings)
    assert len(overheads.decode.seqs) > 2  # batches of several sizes
    assert 0.3 < overheads.decode.usual(0, 4) < 10.0
    assert 0.0 < np.median(overheads.idle_request_s) < 1.0
    assert 0.0 < np.median([delay for one in overheads.delivery_s for delay in one]) < 1.0
