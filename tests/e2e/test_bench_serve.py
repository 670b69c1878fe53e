"""`run bench` against a real server: load, a recorded trace and its replay, comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ostinato.benchmarks.load import server_metrics
from ostinato.benchmarks.report.record import Record, read_records
from ostinato.commands import run
from tests.e2e.server_process import SMALL, ServerProcess


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.jsonl"


@pytest.fixture(scope="module")
def server(trace: Path) -> Iterator[ServerProcess]:
    with ServerProcess(f"server.record_trace={trace}") as server:
        yield server


def bench(tmp_path: Path, *words: str, report: bool = False) -> Record:
    file = tmp_path / "record.json"
    more = (f"bench.output={file}", f"bench.report={str(report).lower()}")
    assert run(["bench", *words, *more, "model.max_model_len=512"]) == 0
    [record] = read_records(file)
    return record


@pytest.mark.timeout(600)
def test_load_then_its_trace_again(server: ServerProcess, trace: Path, tmp_path: Path):
    small = ("workload=prefix", "workload.num_requests=6", "workload.output_len=5")
    load = (f"load.url={server.url}", "load.rates=[20]", "load.concurrency=[2]")
    record = bench(tmp_path, "serve", *small, *load, "slo.e2e_ms=600000", report=True)
    assert [point.label for point in record.points] == ["20 requests/s", "2 at a time"]
    for point in record.points:
        found = {name: metric.value for name, metric in point.metrics.items()}
        assert (found["completed"], found["failed"], found["output_tokens"]) == (6, 0, 30)
        assert found["slo_attainment"] == 1
        assert found["prefix_hit_rate"] > 0.2
        assert found["ttft_p50"] <= found["ttft_p99"] <= found["e2e_p99"]
        assert found["steps"] > 0
        steps = point.details["steps"]  # from the flight recorder, without the warm-up
        assert 0 < len(steps["seconds"]) <= found["steps"]
        assert min(steps["begin_s"]) >= 0
        assert sum(steps["decode_tokens"]) > 0
        rows = point.details["requests"]
        assert all(row["intended_s"] <= row["sent_s"] <= row["first_s"] for row in rows)
    page = (tmp_path / "record.html").read_text()
    for title in ("Latency against load", "Gaps between tokens", "Throughput against latency"):
        assert title in page
    for title in ("Requests over time", "Steps and what they computed"):
        assert title in page

    # Two points of load have six requests each. One warm-up request precedes each point.
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == 14
    assert sorted({line["output_length"] for line in lines}) == [5]
    shared = sum(len(line["hash_ids"]) for line in lines)
    assert len({h for line in lines for h in line["hash_ids"]}) < shared
    fields = {"timestamp", "input_length", "output_length", "hash_ids", "block_size"}
    assert all(line.keys() == fields for line in lines)

    copy = tmp_path / "copy.jsonl"
    copy.write_text(trace.read_text())
    replay = ("workload=trace", f"workload.path={copy}", "workload.time_scale=0.01")
    again = bench(tmp_path, "serve", *replay, f"load.url={server.url}", "load.num_warmups=0")
    figures = again.points[0].metrics
    assert figures["completed"].value == 14
    assert figures["input_tokens"].value == sum(line["input_length"] for line in lines)
    assert figures["prefix_hit_rate"].value > 0.2


def test_turns_carry_the_answers_before_them(server: ServerProcess, tmp_path: Path):
    words = ("workload=conversations", "workload.num_requests=1", "workload.turns=2")
    lengths = ("workload.input_len=40", "workload.length_spread=0", "workload.output_len=20")
    load = (f"load.url={server.url}", "load.concurrency=[1]")
    record = bench(tmp_path, "serve", *words, *lengths, *load)
    first, second = record.points[0].details["requests"]
    assert (first["input_tokens"], second["input_tokens"]) == (40, 100)
    # The full blocks of the first prompt hold 32 tokens. The other cached tokens come from blocks
    # that include the first answer.
    assert second["cached_tokens"] >= 48


def test_another_run_does_not_find_the_prompts_of_the_one_before(
    server: ServerProcess, tmp_path: Path
):
    words = ("workload=fixed", "workload.num_requests=3", "workload.input_len=64")
    load = ("workload.output_len=2", f"load.url={server.url}", "load.concurrency=[1]")
    for _ in range(2):
        record = bench(tmp_path, "serve", *words, *load)
        assert record.points[0].metrics["prefix_hit_rate"].value == 0.0


def test_a_point_shorter_than_the_interval_of_samples_has_its_steps(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_metrics, "_EVERY_S", 600.0)
    words = ("workload=fixed", "workload.num_requests=2", "workload.output_len=2")
    record = bench(tmp_path, "serve", *words, f"load.url={server.url}", "load.concurrency=[1]")
    details = record.points[0].details
    assert "server" not in details
    assert sum(details["steps"]["decode_tokens"]) >= 2


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_sweep_of_servers_compiles_once(tmp_path: Path):
    folder = tmp_path / "sweep"
    words = ["workload=fixed", "workload.num_requests=3", "workload.output_len=3"]
    varied = ["scheduler.max_num_seqs=4,8", "load.concurrency=[2]", f"bench.output={folder}"]
    assert run(["bench", "serve", "--multirun", *words, *varied, "bench.report=false"]) == 0
    [record] = read_records(folder / "sweep.json")
    phases = [point.details["conditions"]["startup_phases_s"] for point in record.points]
    assert [point.error for point in record.points] == [None, None]
    assert "load programs" in phases[1]
    assert "compile" not in phases[1]


_HOLD = """
import sys
from ostinato.benchmarks.load.server_process import Server
from ostinato.conf.compose import load_config
with Server(load_config(sys.argv[1:])) as server:
    print(server.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.timeout(600)
def test_a_server_ends_with_its_parent():
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, *SMALL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    server = psutil.Process(int(process.stdout.readline()))
    family = [server, *server.children(recursive=True)]
    process.kill()  # without any clean-up
    process.wait()
    _, alive = psutil.wait_procs(family, 200)
    assert alive == []


def test_conversations_as_chat(server: ServerProcess, tmp_path: Path):
    turns = ("workload=conversations", "workload.num_requests=2", "workload.turns=3")
    lengths = ("workload.input_len=8", "workload.output_len=4")
    load = (f"load.url={server.url}", "load.endpoint=chat", "load.concurrency=[2]")
    record = bench(tmp_path, "serve", *turns, *lengths, *load)
    figures = record.points[0].metrics
    assert (figures["completed"].value, figures["failed"].value) == (6, 0)


def test_two_engines_in_turns(server: ServerProcess, tmp_path: Path):
    engines = f"bench.engines=['{server.url}','{server.url}']"
    small = ("workload=fixed", "workload.num_requests=4", "workload.input_len=20")
    load = ("workload.output_len=4", "load.concurrency=[2]", "bench.repeats=3", "bench.warmup=0")
    record = bench(tmp_path, "compare", engines, *small, *load)
    first, second = record.points
    assert "ratios" not in first.details
    entry = second.details["ratios"]["output_throughput"]
    assert entry["low"] <= entry["ratio"] <= entry["high"]
    assert entry["rounds"] == 3
    runs = zip(
        second.metrics["output_throughput"].runs,
        first.metrics["output_throughput"].runs,
        strict=True,
    )
    product = 1.0
    for ours, reference in runs:
        product *= ours / reference
    assert entry["ratio"] == pytest.approx(product ** (1 / 3))


def test_a_url_that_refuses_is_counted_and_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "record.json"
    words = ["workload=fixed", "workload.num_requests=50", "load.ready_timeout_s=0.1"]
    url = "load.url=http://127.0.0.1:9"  # the port of the discard service, which is closed
    assert run(["bench", "serve", *words, url, f"bench.output={file}"]) == 1
    [record] = read_records(file)
    found = record.points[0].details["failures"]
    assert found["refused"]["count"] >= 32
    assert sum(entry["count"] for entry in found.values()) == 50
    assert "of 50 requests refused" in capsys.readouterr().out.replace("\n", " ")
