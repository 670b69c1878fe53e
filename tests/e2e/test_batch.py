"""`run batch` as a user runs it: several endpoints, bad lines, and an interruption."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.server_process import SMALL
from tests.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[2]
_OVERRIDES = [one for one in SMALL if not one.startswith("server.")]


def command(source: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "ostinato", "batch", str(source), str(target), *_OVERRIDES]


def rows(file: Path) -> dict[str, dict]:
    lines = [json.loads(row) for row in file.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a request has several answers"
    return found


def test_a_batch_is_answered_and_goes_on_after_an_interruption(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = [
        {"custom_id": f"text-{n}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": f"Story {n}:", "max_tokens": 40, "temperature": 0, "ignore_eos": True}}
        for n in range(60)
    ]  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    requests += [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "vector", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"custom_id": "rank", "method": "POST", "url": "/v1/rerank",
         "body": {"query": "a", "documents": ["a", "b"]}},
        {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": 5}},
        {"custom_id": "stream", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": "x", "stream": True}},
        {"custom_id": "nowhere", "method": "POST", "url": "/reset_prefix_cache", "body": {}},
    ]  # fmt: skip
    source.write_text("\n".join(map(json.dumps, requests)))

    process = subprocess.Popen(command(source, target), cwd=_ROOT, stderr=subprocess.PIPE)
    wait_until(
        lambda: (
            process.poll() is not None
            or (target.is_file() and target.read_bytes().count(b"\n") >= 5)
        )
    )
    process.kill()
    process.communicate()
    before = target.read_bytes()
    num_before = before.count(b"\n")
    assert num_before >= 5

    done = subprocess.run(
        command(source, target), cwd=_ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    whole = before.rindex(b"\n") + 1  # an incomplete last line is written again
    written = [json.loads(row) for row in target.read_bytes()[whole:].splitlines()]
    num_errors = sum(
        row["error"] is not None or row["response"]["status_code"] >= 400 for row in written
    )
    assert (
        f"{len(written)} answered, {num_errors} of them with an error, {num_before} were answered before"
    ) in done.stderr
    assert target.read_bytes().startswith(before[:whole])

    answers = rows(target)
    assert answers.keys() == {request["custom_id"] for request in requests}
    for n in range(60):
        response = answers[f"text-{n}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["usage"]["completion_tokens"] == 40
    assert answers["chat"]["response"]["body"]["object"] == "chat.completion"
    assert len(answers["vector"]["response"]["body"]["data"][0]["embedding"]) == 256
    assert answers["rank"]["response"]["body"]["results"][0]["index"] == 0
    assert answers["bad"]["response"]["status_code"] == 400
    assert answers["bad"]["response"]["body"]["error"]["param"] == "prompt"
    assert "body.stream must be false" in answers["stream"]["error"]["message"]
    assert "url must be one of" in answers["nowhere"]["error"]["message"]

    again = subprocess.run(
        command(source, target), cwd=_ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (again.returncode, target.read_text().count("\n")) == (0, len(requests))
    assert "0 answered, 0 of them with an error, 66 were answered before" in again.stderr


def test_files_are_named_when_they_are_missing(tmp_path):
    for arguments, message in (
        (["in.jsonl"], "run batch takes 2 words, got 1: run batch INPUT OUTPUT"),
        ([str(tmp_path / "no"), str(tmp_path / "out")], "No such file"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ostinato", "batch", *arguments],
            cwd=_ROOT, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode in (1, 2)
        assert message in done.stderr
