"""A recorded trace has lengths, arrival times and shared prefixes, but no text and no token ids."""

import json
from pathlib import Path

import pytest

from ostinato.api.observability import trace_recorder
from ostinato.api.observability.trace_recorder import TraceRecorder
from ostinato.runtime.errors import StartupError
from ostinato.runtime.kv.block_pool import hash_blocks


def test_equal_beginnings_have_equal_numbers(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(str(file), 4)
    recorder.add(10.0, [1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 5])
    recorder.add(10.25, [1, 2, 3, 4, 50, 6, 7, 8], [1])
    recorder.add(10.5, [1, 2, 3, 4], [1], cache_salt="other")
    recorder.add(11.0, [9], [2])
    recorder.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["hash_ids"] for line in lines] == [[0, 1], [0, 1], [0, 2], [3], []]
    assert [line["input_length"] for line in lines] == [9, 9, 8, 4, 1]
    assert [line["output_length"] for line in lines] == [3, 5, 1, 1, 2]
    starts = [line["timestamp"] - lines[0]["timestamp"] for line in lines]
    assert starts == [0, 0, 250, 500, 1000]
    assert {line["block_size"] for line in lines} == {4}


def test_a_prompt_is_hashed_once_for_all_its_completions(make_app, tmp_path: Path, monkeypatch):
    prompts = []

    def noting(root, token_ids, size):
        prompts.append(list(token_ids))
        return hash_blocks(root, token_ids, size)

    monkeypatch.setattr(trace_recorder, "hash_blocks", noting)
    app = make_app()
    file = tmp_path / "trace.jsonl"
    app.service.runner.trace = TraceRecorder(str(file), 1)
    body = {"prompt": [[1, 2], [3]], "n": 3}
    assert app.http.post("/v1/completions", json=body).status_code == 200
    app.service.runner.trace.close()
    assert sorted(prompts) == [[1, 2], [3]]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(line["input_length"] for line in lines) == [1, 1, 1, 2, 2, 2]
    assert all(line["output_length"] > 0 for line in lines)


def test_a_place_that_can_not_be_written(tmp_path: Path):
    with pytest.raises(StartupError, match=r"server.record_trace=.* cannot be written"):
        TraceRecorder(str(tmp_path / "no" / "such" / "folder"), 16)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_becomes_full_ends_the_recording(caplog: pytest.LogCaptureFixture):
    recorder = TraceRecorder("/dev/full", 16)
    for _ in range(3):
        recorder.add(10.0, [1, 2], [3])
    recorder.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        "server.record_trace=/dev/full cannot be written any more, recording has ended: No space "
        "left on device"
    )
