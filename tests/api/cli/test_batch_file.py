"""The files of `run batch`: accepted lines, refused lines, and the files after an interruption."""

from __future__ import annotations

import json

import pytest

from ostinato.api.cli.batch_file import BatchInput, BatchOutput, answered_line, refused_line
from ostinato.runtime.errors import InvalidRequestError

URLS = frozenset({"/v1/embeddings", "/v1/completions"})
GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}


def write(tmp_path, *rows):
    file = tmp_path / "in.jsonl"
    text = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("\n".join(text) + "\n")
    return file


def test_lines_are_read_and_blank_ones_passed_over(tmp_path):
    file = write(tmp_path, GOOD, "", {**GOOD, "custom_id": "b"})
    first, second = BatchInput(file, URLS).lines
    assert (first.number, first.custom_id, first.url, first.problem) == (
        1, "a", "/v1/embeddings", None,
    )  # fmt: skip
    assert json.loads(first.body) == {"input": "x"}
    assert (second.number, second.id) == (3, "batch_req_3")


@pytest.mark.parametrize(
    ("row", "custom_id", "problem"),
    [
        ("{", None, "line 1: Input data was truncated"),
        ({**GOOD, "custom_id": 3}, None, "Expected `str`, got `int` - at `$.custom_id`"),
        ({"custom_id": "a"}, "a", "missing required field `url`"),
        ({**GOOD, "method": "GET"}, "a", "method must be POST, got 'GET'"),
        ({**GOOD, "url": "/x"}, "a", "url must be one of /v1/completions, /v1/embeddings, got"),
        ({**GOOD, "body": {"stream": True}}, "a", "body.stream must be false"),
    ],
)
def test_a_line_that_can_not_be_sent(tmp_path, row, custom_id, problem):
    (line,) = BatchInput(write(tmp_path, row), URLS).lines
    assert line.custom_id == custom_id
    assert problem in (line.problem or "")
    answer = json.loads(refused_line(line))
    assert answer["error"] == {"code": "invalid_line", "message": line.problem}
    assert (answer["id"], answer["custom_id"], answer["response"]) == (
        "batch_req_1",
        custom_id,
        None,
    )


def test_two_lines_with_one_name_are_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="lines 1 and 2 have the custom_id 'a'"):
        BatchInput(write(tmp_path, GOOD, GOOD), URLS)


def test_what_was_answered_is_known_and_half_a_line_is_cut_off(tmp_path):
    lines = BatchInput(
        write(tmp_path, GOOD, "{", {**GOOD, "custom_id": "c"}, {**GOOD, "custom_id": "d"}), URLS
    ).lines
    target = tmp_path / "out.jsonl"
    with BatchOutput(target) as output:
        output.write(answered_line(lines[0], 200, "r", b'{"x":1}'))
        output.write(refused_line(lines[1]))
    whole = target.read_bytes()
    target.write_bytes(whole + answered_line(lines[2], 200, "r", b"{}")[:-7])
    with BatchOutput(target) as output:
        assert [output.has(line) for line in lines] == [True, True, False, False]
        assert target.read_bytes() == whole
        output.write(answered_line(lines[2], 400, "r", b'{"error":{}}'))
    rows = [json.loads(row) for row in target.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == ["a", None, "c"]
    assert rows[0]["response"] == {"status_code": 200, "request_id": "r", "body": {"x": 1}}
    assert rows[2]["error"] is None


def test_a_file_of_something_else_is_not_written_to(tmp_path):
    target = tmp_path / "notes.txt"
    target.write_text("dear diary\n")
    with pytest.raises(InvalidRequestError, match="line 1 is not an answer of a batch"):
        BatchOutput(target)
    assert target.read_text() == "dear diary\n"
    with pytest.raises(InvalidRequestError, match=r"INPUT .*nothing cannot be read: No such file"):
        BatchInput(tmp_path / "nothing", URLS)


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_input_is_not_taken_for_the_output(tmp_path, end):
    """It has a custom_id in each line, as an output does, and perhaps no end of the last line."""
    source = tmp_path / "requests.jsonl"
    text = json.dumps(GOOD) + end
    source.write_text(text)
    with pytest.raises(InvalidRequestError, match="line 1 is not an answer of a batch"):
        BatchOutput(source)
    assert source.read_text() == text
