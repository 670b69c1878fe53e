"""`run simulate` as a command, the fit of overheads, and step costs from data sheets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ostinato.api.cli import run
from ostinato.benchmarks.load_job import JobRequest, LoadJob
from ostinato.benchmarks.record import read_records
from ostinato.benchmarks.simulate.engine import EngineSpec, Overheads
from ostinato.benchmarks.simulate.fit import (
    MixedRun,
    Observation,
    Observations,
    fit_overheads,
)
from ostinato.benchmarks.simulate.jobs import simulate_job
from ostinato.benchmarks.simulate.roofline import ACCELERATORS, ModelShape, roofline_table
from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.limits import StepLimits
from tests.runtime.cost_tables import make_table

LLAMA_8B = ModelShape(
    num_parameters=7_500_000_000,
    num_logit_parameters=525_000_000,
    weight_bytes=16_050_000_000,
    kv_bytes_per_token=131_072,
    attention_width=32 * 32 * 128,
)


SPEC = EngineSpec(
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
    upper=StepLimits(16, 256),
    num_blocks=513,
    block_size=16,
    max_model_len=512,
    costs=make_table(),
)


def observations(true: Overheads, jitter: tuple[float, ...] = (0.0,)) -> Observations:
    table = make_table()
    found = []
    for batch in (1, 4, 16):
        gap = true.decode_scale * table.decode_seconds(batch, 48) + true.step_s
        gap += true.token_s * batch
        found.append(Observation(batch, 48, tuple(gap + one for one in jitter)))
    for tokens in (32, 192, 448):
        first = true.prompt_scale * table.step_seconds(tokens, 1, 0)
        first += true.step_s + true.token_s + true.request_s
        found.append(Observation(0, tokens, (first, first, first)))
    requests = [
        JobRequest(prompt=list(range(100 * key, 100 * key + 60)), max_tokens=4 + key % 7)
        for key in range(20)
    ]
    job = LoadJob(url="", model="", requests=requests, concurrency=4)
    lasts = max(simulate_job(dataclasses.replace(SPEC, overheads=true), job).last_s)
    return Observations(found, [MixedRun(job, lasts)])


@pytest.mark.parametrize(
    "true",
    [
        Overheads(),
        Overheads(
            decode_scale=1.4,
            prompt_scale=1.2,
            mixed_scale=1.7,
            step_s=3e-4,
            token_s=1e-4,
            request_s=4e-3,
        ),
        Overheads(decode_scale=0.8, prompt_scale=2.0, token_s=5e-4),
    ],
)
def test_the_fit_explains_what_was_measured_and_what_was_not(true: Overheads):
    # A batch's cost in this table is linear, so scale and overheads can stand for each other: what
    # counts is the time of a step.
    table = SPEC.costs
    fitted = fit_overheads(SPEC, observations(true))
    for batch in (1, 2, 7, 32):
        gaps = [
            one.decode_scale * table.decode_seconds(batch, 48) + one.step_s + one.token_s * batch
            for one in (fitted, true)
        ]
        assert gaps[0] == pytest.approx(gaps[1], rel=1e-6)
    for tokens in (32, 100, 900):
        firsts = [
            one.prompt_scale * table.step_seconds(tokens, 1, 0)
            + one.step_s
            + one.token_s
            + one.request_s
            for one in (fitted, true)
        ]
        assert firsts[0] == pytest.approx(firsts[1], rel=1e-6)
    assert fitted.mixed_scale == pytest.approx(true.mixed_scale, rel=0.02)


def test_disturbances_are_kept_as_seconds_off_the_usual_gap():
    jitter = (-0.001, *([0.0] * 97), 0.002, 0.03)
    fitted = fit_overheads(SPEC, observations(Overheads(), jitter))
    assert len(fitted.jitter_s) == 100
    assert fitted.jitter_s[50] == pytest.approx(0.0)
    assert fitted.jitter_s[0] < 0.0
    assert fitted.jitter_s[-1] > 0.01
    assert list(fitted.jitter_s) == sorted(fitted.jitter_s)


def test_no_overhead_is_below_zero():
    # Gaps shorter than the table says, and no trend with the batch.
    low = [Observation(batch, 48, (1e-4,)) for batch in (1, 4, 16)]
    low += [Observation(0, tokens, (1e-4,)) for tokens in (32, 192)]
    fitted = fit_overheads(SPEC, Observations(low, []))
    assert min(fitted.step_s, fitted.token_s, fitted.request_s) >= 0.0
    assert min(fitted.decode_scale, fitted.prompt_scale) >= 0.5
    with pytest.raises(ValueError, match="gaps of a batch and first tokens"):
        fit_overheads(SPEC, Observations(low[:3], []))


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_roofline_is_a_table_and_bounded_by_the_device(name: str):
    device = ACCELERATORS[name]
    table = roofline_table(device, LLAMA_8B, StepLimits(256, 8192), 8192)
    alone = table.decode_seconds(1, 0)
    assert alone >= LLAMA_8B.weight_bytes / (device.bandwidth_gb_s * 1e9)
    assert table.decode_seconds(256, 1024) > table.decode_seconds(256, 0) > alone
    prompt = table.step_seconds(8192, 1, 0)
    assert prompt >= 2 * 8192 * LLAMA_8B.num_parameters / (device.tflops * 1e12)


def test_a_small_batch_on_an_h100_is_bound_by_its_memory():
    table = roofline_table(ACCELERATORS["h100"], LLAMA_8B, StepLimits(256, 8192), 8192)
    # 16.05 GB at 85 % of 3350 GB/s, and a step's own 0.25 ms.
    assert table.decode_seconds(1, 0) == pytest.approx(16.05e9 / (0.85 * 3350e9) + 250e-6, rel=1e-3)


FLEET = (
    *("simulate", "model=llama-8b", "simulate.device=h100", "simulate.processes=1"),
    *("workload=random", "workload.num_requests=40", "load.rates=[20]"),
)


def test_a_fleet_in_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "fleet.json"
    more = ("simulate.replicas=2", "simulate.router=least_load", "slo.ttft_ms=500")
    assert run([*FLEET, *more, f"simulate.output={path}"]) == 0
    [record] = read_records(path)  # fits benchmarks/schema.json
    assert record.kind == "simulate"
    [point] = record.points
    assert point.parameters == {
        "rate": 20.0,
        "concurrency": None,
        "replicas": 2,
        "router": "least_load",
    }
    metrics = point.metrics
    assert metrics["completed"].value == 40
    assert metrics["slo_attainment"].value == 1.0
    assert 5 < metrics["itl_p50"].value < 20  # ms; a step of 16 GB on an H100
    assert metrics["ttft_p50"].value <= metrics["ttft_p99"].value
    assert "simulated: step costs data sheet of h100" in capsys.readouterr().out


def test_rounds_and_a_saved_table(tmp_path: Path):
    table, first, again = (tmp_path / name for name in ("costs", "a.json", "b.json"))
    rounds = ("simulate.rounds=3",)
    assert run([*FLEET, *rounds, f"simulate.save_costs={table}", f"simulate.output={first}"]) == 0
    assert run([*FLEET, *rounds, f"simulate.costs={table}", f"simulate.output={again}"]) == 0
    one, two = (
        {
            name: metric["value"]
            for name, metric in json.loads(path.read_text())["points"][0]["metrics"].items()
            if name not in ("simulation_time", "speed")
        }
        for path in (first, again)
    )
    assert one == two
    assert one["completed"] == 120


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["simulate.device=h1000"], "simulate.device must be one of a10g, a100"),
        (["simulate.costs=/no/such/file"], "simulate.costs=/no/such/file can not be read"),
        (["simulate.router=random"], "simulate.router must be one of round_robin, least_load"),
        (["simulate.replicas=0"], "simulate.replicas must be in [1, 100000], got 0"),
        (
            ["simulate.rounds=2", "load.rates=[]", "load.concurrency=[2]"],
            "simulate.rounds=2 repeats",
        ),
        (["simulate.speed=2"], "there is no key 'simulate.speed'"),
    ],
)
def test_what_can_not_be_simulated_is_one_line(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert run([*FLEET, *overrides]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request")],
)
def test_an_empty_trace_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    arguments = [*FLEET, "workload=trace", f"workload.path={trace}", "load.rates=[]"]
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_table_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "costs"
    file.write_bytes(b"nothing of the kind")
    assert run([*FLEET, f"simulate.costs={file}"]) == 2
    assert "write one with simulate.save_costs" in capsys.readouterr().err
