"""`run bench serve` against faulty servers: their failures are counted, and the command ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ostinato.benchmarks.report.record import read_records
from ostinato.commands import run
from tests.benchmarks.load.answering import Answering, no_http, stall, status


@pytest.mark.parametrize(
    ("handler", "expected", "words"),
    [
        (status(500, body=b"kaputt"), "http 500", "kaputt"),
        (
            status(302, "Location: http://elsewhere.invalid/\r\n"),
            "redirected",
            "302 to http://elsewhere.invalid/",
        ),
        (stall, "stalled", "no byte for 0.5 s"),
        (no_http, "broken", "SSH"),
    ],
    ids=["500", "redirect", "stall", "another protocol"],
)
def test_the_command_counts_them_and_ends(
    tmp_path: Path, handler: Any, expected: str, words: str, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "record.json"
    # Elsewhere a pause of this process would count as a stall.
    stall_s = 0.5 if expected == "stalled" else 60
    limits = (f"load.stall_timeout_s={stall_s}", "load.ready_timeout_s=0.5", "load.give_up_after=3")
    small = ("workload=fixed", "workload.num_requests=8", "load.concurrency=[3]")
    with Answering(handler) as server:
        command = ["bench", "serve", f"load.url={server.url}", *small, *limits]
        assert run([*command, f"bench.output={file}", "bench.report=false"]) == 1
    [record] = read_records(file)
    [point] = record.points
    found = point.details["failures"]
    assert found[expected]["count"] >= 3
    assert words in found[expected]["example"]
    assert sum(entry["count"] for entry in found.values()) == 8
    assert point.metrics["completed"].value == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"of 8 requests {expected} (" in printed
    assert "set load.model" in printed
