"""Sweeps: expansion and refusals; then a real sweep in which points fail, and which is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.benchmarks.report.plots import pareto_front
from ostinato.benchmarks.report.record import read_records
from ostinato.commands import run
from ostinato.conf.compose import expand_sweep
from ostinato.conf.errors import ConfigError

TINY = [
    "model=llama-45m",
    "model.config={vocab_size: 3072, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 256}",
    "graphs.mode=eager",
    "graphs.attention=reference",
    "graphs.pack_weights=false",
    "device.threads=1",
    "bench.repeats=1",
    "bench.warmup=0",
]


def test_every_combination_the_last_key_fastest():
    points = expand_sweep(
        ["cache.block_size=16,32", "device.threads=1", "bench.repeats=choice(1,2)"]
    )
    assert [chosen for chosen, _ in points] == [
        {"cache.block_size": "16", "bench.repeats": "1"},
        {"cache.block_size": "16", "bench.repeats": "2"},
        {"cache.block_size": "32", "bench.repeats": "1"},
        {"cache.block_size": "32", "bench.repeats": "2"},
    ]
    assert points[0][1] == ["device.threads=1", "cache.block_size=16", "bench.repeats=1"]


def test_ranges_groups_and_lists():
    ranged = expand_sweep(["scheduler.max_num_seqs=range(8,17,4)"])
    assert [chosen["scheduler.max_num_seqs"] for chosen, _ in ranged] == ["8", "12", "16"]
    assert len(expand_sweep(["model=demo,gpt2"])) == 2
    listed = expand_sweep(["load.rates=[1],[2,4]"])
    assert [chosen["load.rates"] for chosen, _ in listed] == ["[1]", "[2,4]"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["scheduler.max_num_sequence=1,2"],
            "there is no key 'scheduler.max_num_sequence'; did you",
        ),
        (["cache.block_size=16,17"], "cache.block_size must be one of 8, 16, 32, 64, 128, got 17"),
        (["cache.block_size=interval(8,16)"], "list the values, as in cache.block_size=1,2,4"),
        (["cache.block_size=16"], "--multirun needs a key with several values"),
        (
            ["scheduler.max_num_seqs=8,32", "scheduler.max_num_batched_tokens=16"],
            "scheduler.max_num_batched_tokens must be null or in",
        ),
    ],
)
def test_what_would_fail_is_refused_before_anything_starts(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        expand_sweep(words)


def test_only_bench_sweeps(capsys: pytest.CaptureFixture[str]):
    assert run(["plan", "--multirun", "cache.block_size=16,32"]) == 2
    assert capsys.readouterr().err == "run: run plan runs once; --multirun is for run bench\n"


def test_the_front_is_what_nothing_beats():
    assert pareto_front([1.0, 2.0, 3.0, 2.5], [5.0, 7.0, 6.0, 9.0]) == [0, 1, 3]
    assert pareto_front([1.0, 1.0], [2.0, 3.0]) == [1]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    requests = [{"prompt": [5, 6, 7], "max_tokens": 4}, {"prompt": [8] * 40, "max_tokens": 5}]
    (tmp_path / "work.json").write_text(json.dumps(requests))
    return [
        "bench",
        "--multirun",
        "workload=tokens",
        f"workload.path={tmp_path / 'work.json'}",
        f"bench.output={tmp_path / 'sweep'}",
        *TINY,
    ]


@pytest.mark.slow  # 20 seconds
@pytest.mark.timeout(600)
def test_a_sweep_isolates_a_failure_reuses_the_model_and_resumes(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "sweep"
    # A cache of the second size cannot hold one sequence of 256 tokens.
    varied = [
        "model.max_model_len=256",
        "scheduler.max_num_batched_tokens=64,128",
        "cache.memory_gib=0.01,0.00001",
    ]
    assert run([*words, *varied]) == 1
    [record] = read_records(folder / "sweep.json")
    assert [point.label for point in record.points] == [
        f"max_num_batched_tokens={tokens} memory_gib={gib}"
        for tokens in (64, 128)
        for gib in ("0.01", "1e-05")
    ]
    good, failed = record.points[0::2], record.points[1::2]
    assert [point.error for point in good] == [None, None]
    assert all("cache.memory_gib" in (point.error or "") for point in failed)
    assert good[0].parameters["scheduler.max_num_batched_tokens"] == 64.0
    assert all(point.metrics["output_throughput"].value > 0 for point in good)
    assert "failed: " in capsys.readouterr().out
    files = {file: read_records(file)[0] for file in folder.glob("point-*.json")}
    reused = [r.conditions["model_reused"] for r in files.values() if not r.points[0].error]
    assert sorted(reused) == [False, True], "the two points share one loaded model"

    # The second run keeps the good results and repeats only the failed points.
    kept = {file: file.stat().st_mtime_ns for file, r in files.items() if not r.points[0].error}
    assert run([*words, *varied]) == 1
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert "kept from an earlier run: 2 of 4 points" in capsys.readouterr().out
    assert (folder / "sweep.html").read_text().count("<svg") >= 1
