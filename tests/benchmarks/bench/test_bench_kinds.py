"""Kinds of `run bench` with a small engine in this process, and the files that they write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.benchmarks.report.record import Metric, Record, read_records
from ostinato.commands import run
from ostinato.conf.errors import ConfigError
from tests.benchmarks.sweep.test_sweep import TINY
from tests.runtime.tiny import MODEL

SHORT = ("workload.input_len=16", "workload.output_len=4")


def bench(tmp_path: Path, *words: str, report: bool = False) -> Record:
    file = tmp_path / "out" / "record.json"
    more = (f"bench.output={file}", f"bench.report={str(report).lower()}")
    assert run(["bench", *words, *TINY, *more]) == 0
    [record] = read_records(file)
    return record


def test_latency_covers_the_grid_that_fits(tmp_path: Path):
    grid = ("bench.batch_sizes=[1,3]", "bench.input_lens=[8,250]", "bench.output_lens=[2,40]")
    record = bench(tmp_path, "latency", *grid)
    assert [point.label for point in record.points] == [
        *("1 x 8 + 2", "1 x 8 + 40", "1 x 250 + 2"),
        *("3 x 8 + 2", "3 x 8 + 40", "3 x 250 + 2"),
    ]
    assert record.notes[0] == "250 + 40 tokens left out: the context holds 256"
    for point in record.points:
        per_token = point.metrics["time_per_output_token"].value
        seconds = point.metrics["duration"].value
        assert per_token * point.parameters["output_len"] == pytest.approx(1000 * seconds)


def test_determinism_counts_equal_answers(tmp_path: Path):
    words = ("workload=random", "workload.num_requests=4", "workload.input_len=20")
    record = bench(tmp_path, "determinism", *words, "workload.output_len=4")
    assert [point.label for point in record.points] == ["greedy", "sampled"]
    for point in record.points:
        assert point.metrics["requests"].value == 4
        differing = point.details["differing_requests"]
        for way in ("together", "other_order", "cached", "cached_alone"):
            share = point.metrics[f"equal_{way}"].value
            assert share == 1 - len(differing[way]) / 4
    greedy = record.points[0].metrics
    assert greedy["equal_cached_alone"].value == 1.0, "alone, a cached prompt changes nothing"


def test_speculation_compares_each_drafter_with_plain_decoding(tmp_path: Path):
    words = ("workload=random", "workload.num_requests=3", "workload.input_len=20")
    draft = tmp_path / "draft"
    draft.mkdir()
    sizes = {"vocab_size": 3072, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    settings = {**MODEL, **sizes, "num_hidden_layers": 1, "eos_token_id": 2}
    (draft / "config.json").write_text(json.dumps(settings))
    words = (*words, "speculation.method=draft", f"speculation.model={draft}")
    record = bench(tmp_path, "speculation", *words, "workload.output_len=24", "bench.repeats=2")
    assert record.notes[0] == "equal to plain: yes"
    names = ["plain", "ngram", "auto", "draft", "replay 0.7"]
    ways = ["one at a time", "3 at once"]
    assert [one.label for one in record.points] == [f"{n}, {way}" for way in ways for n in names]
    for point in record.points:
        assert point.metrics["equal_to_plain"].value == 1.0
        assert point.metrics["tokens_per_step"].value > 0.5
        assert ("accepted" in point.metrics) <= (point.parameters["drafter"] != "plain")


def test_prefix_finds_the_shared_share(tmp_path: Path):
    words = ("bench.shares=[0,0.5]", "workload.input_len=64", "workload.output_len=2")
    record = bench(tmp_path, "prefix", *words, "workload.num_requests=5")
    cold, half = record.points
    assert cold.metrics["prefix_hit_rate"].value == 0
    # Four of five prompts find two of their four blocks.
    assert half.metrics["prefix_hit_rate"].value == pytest.approx(4 * 32 / (5 * 64))
    assert half.metrics["ttft_cached"].value > 0


def test_ops_are_measured_against_the_machine(tmp_path: Path):
    record = bench(tmp_path, "ops", "bench.batch_sizes=[2]", "bench.input_lens=[16]")
    kernels = {point.parameters["kernel"] for point in record.points}
    assert kernels == {
        *(f"linear, {n}" for n in ("qkv", "attention out", "mlp in", "mlp out", "logits")),
        *("rms norm", "gated silu", "attention, decode", "attention, prefill"),
    }
    rates = record.conditions["rates"]
    for point in record.points:
        figures = {name: metric.value for name, metric in point.metrics.items()}
        assert figures["best"] <= figures["median"]
        by_bytes = figures["bandwidth"] * 1e9 / rates["bytes_s"]
        by_flop = figures["rate"] * 1e9 / rates["matmul_flop_s"]
        assert figures["roofline_share"] == pytest.approx(max(by_bytes, by_flop))


def test_the_report_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ("throughput", "workload=fixed", *SHORT, "workload.num_requests=3")
    record = bench(tmp_path, *words, report=True)
    out = tmp_path / "out"
    page = (out / "record.html").read_text()
    assert str(out / "record.html") in capsys.readouterr().out
    for outside in ("http://www.w3.org", "http://purl.org", "http://creativecommons.org"):
        page = page.replace(outside, "")  # XML namespaces, which a browser does not load
    assert "src=" not in page
    assert "<link" not in page
    assert "<script" not in page
    assert "Steps and what they computed" in page
    assert f"{record.conditions['config']['workload']['num_requests']}" in page
    assert (out / "record-steps.png").read_bytes().startswith(b"\x89PNG")


def test_history_shows_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "log.jsonl"
    bench(tmp_path, "workload=fixed", *SHORT, "workload.num_requests=2", f"bench.append={log}")
    [first] = read_records(log)
    second = first.to_dict()
    second["conditions"]["time"] = "2999-01-01T00:00:00+00:00"
    second["conditions"]["commit"] = "f" * 40
    metric = second["points"][0]["metrics"]["output_throughput"]
    metric["value"] *= 1.5
    second["conditions"]["config"]["cache"]["block_size"] = 32
    # A third result with another workload. It is not compared with the first two.
    other = json.loads(json.dumps(second))
    other["conditions"]["config"]["workload"]["input_len"] = 17
    with log.open("a") as file:
        file.write(json.dumps(second) + "\n" + json.dumps(other) + "\n")
    capsys.readouterr()
    result = tmp_path / "history.json"
    assert run(["bench", "history", f"bench.files=[{log}]", f"bench.output={result}"]) == 0
    [record] = read_records(result)
    assert [point.parameters["commit"] for point in record.points][1] == "f" * 9
    assert record.points[1].details["change"]["output_throughput"] == pytest.approx(0.5)
    assert record.points[2].details["change"]["output_throughput"] == 0.0
    assert any(note.endswith(": cache.block_size=32 (was 16)") for note in record.notes)
    printed = capsys.readouterr().out
    assert printed.count("(+50%)") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "is neither JSON nor JSON lines: "),
        ('{"schema_version": 1}', "is not a result of run bench: $: 'kind' is a required property"),
        ("[]", "is not a result of run bench: $: [] is not of type 'object'"),
    ],
)
def test_a_file_that_is_no_result(tmp_path: Path, content: str, message: str):
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_records(file)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["history"], "run: bench.files names no result: "),
        (["history", "bench.files=[/no/such]"], "run: /no/such cannot be read: No such file"),
        (["compare"], "run: bench.engines needs two or more, "),
        (["compare", "bench.engines=['', 'cache.blok=1']"], "run: cache.blok=1: there is no key"),
        (["serv"], "run: run bench has no 'serv'; did you mean run bench serve?"),
        (["serve", "load.url=localhost:1"], "run: load.url=localhost:1 must begin with http://"),
        (["serve", "load.ramp=linear"], "run: load.ramp=linear goes from load.rates to "),
    ],
)
def test_what_can_not_be_measured_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
):
    assert run(["bench", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)


def test_headers_with_keys_are_not_written(tmp_path: Path):
    record = bench(
        tmp_path, "workload=fixed", *SHORT, "workload.num_requests=1", "load.headers.Auth=geheim"
    )
    assert record.conditions["config"]["load"]["headers"] == {"Auth": "(not kept)"}
    assert "geheim" not in json.dumps(record.to_dict())


def test_a_record_comes_back_as_it_was(tmp_path: Path):
    record = bench(tmp_path, "workload=fixed", *SHORT, "workload.num_requests=1")
    point = replace(record.points[0], metrics={"x": Metric.of([1.0, 3.0, 2.0], "s", "lower")})
    again = Record.from_dict(replace(record, points=[point]).to_dict())
    assert again.points[0].metrics["x"] == Metric(2.0, "s", "lower", (1.0, 3.0, 2.0))
