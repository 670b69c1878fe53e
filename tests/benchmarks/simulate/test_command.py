"""`run simulate` as a command, and step costs from data sheets."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ostinato.benchmarks.report.record import read_records
from ostinato.benchmarks.simulate.specs import model_shape, planned_spec, without_weights
from ostinato.benchmarks.simulate.step_times.device_roofline import (
    ACCELERATORS,
    LINKS,
    Division,
    ModelShape,
    roofline_table,
)
from ostinato.commands import run
from ostinato.conf.compose import load_config
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.plan.model_source import open_model
from tests.runtime.hybrid import SLOT_BYTES, hybrid_config

LLAMA_8B = ModelShape(
    num_parameters=7_500_000_000,
    num_logit_parameters=525_000_000,
    weight_bytes=16_050_000_000,
    kv_bytes_per_token=131_072,
    attention_width=32 * 32 * 128,
)


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


def test_ranks_divide_the_work_and_add_their_exchanges():
    device, limits = ACCELERATORS["h100"], StepLimits(256, 8192)
    shape = replace(LLAMA_8B, num_layers=32, hidden_bytes=8192)
    alone = roofline_table(device, shape, limits, 8192).decode_seconds(1, 0) - 250e-6
    for name, link in LINKS.items():
        two = roofline_table(device, shape, limits, 8192, Division(tensor=2, link=link))
        # Each layer sums a hidden state twice. A sum takes two latencies and moves half of the
        # state twice.
        exchanges = 64 * (2e-6 * link.latency_us + 8192 / (0.85e9 * link.gb_s))
        assert two.decode_seconds(1, 0) == pytest.approx(alone / 2 + 250e-6 + exchanges), name
        stages = roofline_table(device, shape, limits, 8192, Division(pipeline=3, stage_link=link))
        hops = 2 * (1e-6 * link.latency_us + 8192 / (0.85e9 * link.gb_s))
        assert stages.decode_seconds(1, 0) == pytest.approx(alone + 750e-6 + hops), name


def test_a_model_that_needs_several_devices_is_planned_for_them():
    settings = ["model=llama-70b", "simulate.device=h100"]
    with pytest.raises(StartupError, match="not enough memory"):
        planned_spec(load_config(settings), None, "h100")
    spec = planned_spec(load_config([*settings, "parallel.tensor=4"]), None, "h100")
    assert spec.num_stages == 1
    staged = planned_spec(load_config([*settings, "parallel.pipeline=4"]), None, "h100")
    assert staged.num_stages == staged.max_in_flight == 4
    assert staged.num_blocks > 0.8 * spec.num_blocks


def shape_of(option: str) -> ModelShape:
    config = without_weights(load_config([f"model={option}"]))
    return model_shape(open_model(config, torch.device("cuda")))


@pytest.mark.parametrize(
    ("option", "active"),  # billions of parameters that a token uses, as the authors state them
    [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22.0), ("olmoe-7b", 1.3)],
)
def test_a_roofline_counts_the_experts_of_a_token(option: str, active: float):
    shape = shape_of(option)
    # The authors count the embedding and the output head too.
    tables = shape.num_logit_parameters * 2
    assert shape.num_parameters + tables == pytest.approx(active * 1e9, rel=0.03)
    # A step of one token reads the experts of that token, and a large step reads all.
    assert shape.read_bytes(1) == pytest.approx(
        2 * (shape.num_parameters + shape.num_logit_parameters), rel=1e-6
    )
    assert shape.read_bytes(4096) == pytest.approx(shape.weight_bytes, rel=1e-6)
    device = ACCELERATORS["b200"]
    table = roofline_table(device, shape, StepLimits(256, 8192), 8192)
    alone = shape.read_bytes(1) / (0.85 * device.bandwidth_gb_s * 1e9)
    assert table.decode_seconds(1, 0) == pytest.approx(alone + 250e-6, rel=1e-3)


def test_a_roofline_reads_the_window_alone():
    shape = shape_of("gemma3-4b")
    assert shape.seen(512) == 512
    assert shape.seen(34 * 1024) == 5 * 1024 + 29 * 1024 / 34 + 0.0
    whole = dataclasses.replace(shape, windows={})
    device, limits = ACCELERATORS["h100"], StepLimits(64, 2048)
    tables = [roofline_table(device, each, limits, 32_768) for each in (shape, whole)]
    short, long = ([table.decode_seconds(64, n) for table in tables] for n in (1024, 16_384))
    assert short[0] == pytest.approx(short[1])
    saved = 64 * 29 / 34 * (16_384 - 1024) * shape.kv_bytes_per_token
    assert long[1] - long[0] == pytest.approx(saved / (0.85 * device.bandwidth_gb_s * 1e9))


def test_a_roofline_reads_and_writes_states_whatever_the_context():
    source = open_model(without_weights(hybrid_config()), torch.device("cuda"))
    shape = model_shape(source)
    assert (shape.state_bytes, shape.state_operations) == (3 * SLOT_BYTES, 0)
    assert (shape.windows, shape.num_layers, shape.attention_width) == ({0: 1}, 4, 4 * 16)
    device, limits = ACCELERATORS["h100"], StepLimits(64, 2048)
    states = 2 << 20
    tables = [
        roofline_table(device, dataclasses.replace(shape, state_bytes=size), limits, 32_768)
        for size in (0, states)
    ]
    for context in (0, 1024, 16_384):
        without, with_states = (table.decode_seconds(64, context) for table in tables)
        seconds = 2 * 64 * states / (0.85 * device.bandwidth_gb_s * 1e9)
        assert with_states - without == pytest.approx(seconds)


def test_a_simulated_engine_has_the_slots_of_its_plan():
    words = ("scheduler.max_num_seqs=null", "cache.state_slots=6")
    spec = planned_spec(hybrid_config(*words, "speculation.method=auto"), None, "h100")
    assert (spec.num_states, spec.upper.max_num_seqs, spec.limits.max_num_seqs) == (7, 5, 5)
    assert spec.drafts is not None
    stages = hybrid_config("parallel.pipeline=2", attention=(0,))
    assert 1 < planned_spec(stages, None, "h100").num_blocks < 1 << 20


def test_a_model_without_experts_reads_all_weights():
    shape = shape_of("llama-1b")
    assert shape.read_bytes(1) == shape.weight_bytes
    assert shape.num_parameters + shape.num_logit_parameters == 1_235_814_400


FLEET = (
    *("simulate", "model=llama-8b", "simulate.device=h100", "simulate.processes=1"),
    *("workload=random", "workload.num_requests=40", "load.rates=[20]"),
)


def test_a_fleet_in_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "fleet.json"
    more = ("simulate.replicas=2", "simulate.router=least_load", "slo.ttft_ms=500")
    assert run([*FLEET, *more, f"simulate.output={path}"]) == 0
    [record] = read_records(path)  # fits benchmarks/report/schema.json
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
    assert "simulated: step costs from the data sheet of h100" in capsys.readouterr().out


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
        (["simulate.costs=/no/such/file"], "simulate.costs=/no/such/file cannot be read"),
        (["simulate.router=random"], "simulate.router must be one of round_robin, least_load"),
        (["parallel.data=2"], "a fleet is simulated with simulate.replicas=2"),
        (["simulate.replicas=0"], "simulate.replicas must be in [1, 100000], got 0"),
        (
            ["simulate.rounds=2", "load.rates=[]", "load.concurrency=[2]"],
            "simulate.rounds=2, but the times",
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
