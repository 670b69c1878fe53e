"""The table of `run bench`: figures from measurements by hand, in 100 columns."""

from pathlib import Path

import pytest

from ostinato.benchmarks.report import Measurement, print_report, summary


def measurement(part: str, **changes: object) -> Measurement:
    values: dict[str, object] = {
        "part": part,
        "seconds": 10.0,
        "num_prompt_tokens": 12_000,
        "num_output_tokens": 2_650,
        "num_cached_tokens": 0,
        "first_token_s": None,
        "decode_tok_s": None,
        "overhead": 0.05,
        "num_steps": 130,
        "bandwidth_gb_s": 61.4,
        "other_cpu": 0.02,
    }
    return Measurement(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([3.14159], "3.14"),
        ([40.0, 42.06, 43.0], "42.1 [40.0-43.0]"),
        ([1234.5, 1000.0], "1,117 [1,000-1,234]"),
        ([0.03, 0.05], "0.04 [0.03-0.05]"),
    ],
)
def test_summary(values: list[float], text: str):
    assert summary(values) == text


def test_rates_are_tokens_per_second_of_the_whole():
    measured = measurement("offline")
    assert measured.output_tok_s == 265.0
    assert measured.total_tok_s == 1465.0


def test_the_table(capsys: pytest.CaptureFixture[str]):
    record = {
        "conditions": {
            "model": "llama-45m",
            "gpus": [],
            "cpu": "Some CPU, 2 cores",
            "threads": 2,
            "versions": {"torch": "2.13.0"},
            "commit": "0123456789abcdef-dirty",
            "startup_s": 3.21,
            "startup_phases_s": {"weights": 0.4, "compile": 2.0},
        },
        "notes": ["prefix left out: 1120 tokens, the context holds 512"],
        "peak_rss_mib": 812,
        "peak_rss_contains_probes": False,
        "late_compiles": [
            {"what": "c++", "shape": "tokens=5,seqs=2", "count": 2},
            {"what": "dynamo", "shape": "idle", "count": 1},
        ],
    }
    measurements = [
        measurement("single", first_token_s=0.0123, decode_tok_s=391.2, num_output_tokens=128),
        measurement("offline", seconds=2.0),
        measurement("single", first_token_s=0.0125, decode_tok_s=401.2, num_output_tokens=128),
        measurement("offline", seconds=2.5, other_cpu=0.5),
    ]
    print_report(record, measurements, Path("out.json"))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 100
    cells = [line.split("  ") for line in lines]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in cells]
    state = ["5.0%", "61.4 [61.4-61.4]"]
    assert ["single", "decode, one stream", "396.2 [391.2-401.2]", "tok/s", *state, "2%"] in rows
    assert ["time to first token", "12.4 [12.3-12.5]", "ms"] in rows
    assert ["offline", "all requests", "2.25 [2.00-2.50]", "s", *state, "50%"] in rows
    assert ["output", "1,192 [1,060-1,325]", "tok/s"] in rows
    text = "\n".join(lines)
    late = "compilations after the start: 3 (c++ at tokens=5,seqs=2: 2; dynamo at idle: 1)"
    assert late in " ".join(lines)
    assert "ready in 3.2 s (weights 0.4, compile 2.0); peak memory 812 MiB;" in text
    assert "commit 0123456789ab-dirty\n" in text
    assert "- prefix left out: 1120 tokens, the context holds 512\n" in text
