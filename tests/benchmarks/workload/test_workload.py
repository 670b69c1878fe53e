"""A workload has the same ids on each machine, and a bad file gives an error of one line."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.benchmarks.workload.workload import (
    Part,
    WorkItem,
    load_tokens,
    shift,
    standard_workload,
)
from ostinato.commands import run
from ostinato.conf.errors import ConfigError


def test_the_standard_workload_never_changes():
    """The digests are those of the file with which the published figures were measured."""
    parts = standard_workload()
    digests = {
        part.name: hashlib.sha256(
            json.dumps([[item.prompt, item.max_tokens] for item in part.items]).encode()
        ).hexdigest()[:16]
        for part in parts
    }
    assert digests == {
        "single": "eed6bcde30f03f7b",
        "ttft": "c561463f13d605cd",
        "offline": "78b6af8721d6f6f3",
        "prefix": "46a0c05450eaad25",
    }
    sizes = [(part.num_prompt_tokens, part.num_output_tokens) for part in parts]
    assert sizes == [(128, 128), (512, 1), (10254, 2651), (17408, 512)]


@given(
    st.integers(0, 1000), st.lists(st.integers(256, 29_999), min_size=2, max_size=2, unique=True)
)
def test_shifted_ids_stay_ordinary_and_different(number: int, ids: list[int]):
    shifted = shift(ids, number)
    assert all(256 <= token_id < 30_000 for token_id in shifted)
    assert shifted[0] != shifted[1]
    assert shift(shifted, 29_744 - number) == ids  # after the whole period


def test_shift_is_the_formula_of_the_peers():
    assert shift([256, 29_999, 1000], 1) == [256 + 7919, 256 + 7918, 8919]


def test_repetitions_share_no_prompt():
    part = standard_workload()[3]
    assert part.repetition(0).items == part.items
    first, second = part.repetition(1), part.repetition(2)
    assert first.items[0].prompt[:16] != second.items[0].prompt[:16]
    assert first.items[0].prompt[:1024] == first.items[1].prompt[:1024]
    assert first.num_output_tokens == 512


def test_ids_are_folded_into_a_small_vocabulary():
    part = Part("x", [WorkItem([5, 12, 31], 2)])
    assert part.folded(32) is part
    assert part.folded(10) == Part("x", [WorkItem([5, 2, 1], 2)])


def write(tmp_path: Path, content: str) -> str:
    file = tmp_path / "work.json"
    file.write_text(content)
    return str(file)


def test_a_list_of_requests(tmp_path: Path):
    path = write(
        tmp_path, '[{"prompt": [1, 2], "max_tokens": 3}, {"prompt": [4], "max_tokens": 5}]'
    )
    assert load_tokens(path) == [Part("list", [WorkItem([1, 2], 3), WorkItem([4], 5)])]


def test_parts_of_the_standard_kind(tmp_path: Path):
    path = write(
        tmp_path,
        '{"note": "x", "single": {"prompt": [300], "max_tokens": 3}, '
        '"offline": [{"prompt": [1], "max_tokens": 2}]}',
    )
    assert load_tokens(path) == [
        Part("single", [WorkItem([300], 3)], shifts=True),
        Part("offline", [WorkItem([1], 2)], shifts=False),  # 1 is a special id, used unchanged
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "{path} is not JSON: Expecting property name"),
        ("3", "{path} must hold a list of requests or an object with some of single, ttft, "),
        ("[]", "{path} has no requests"),
        ("{}", "{path} has none of the parts single, ttft, offline, prefix"),
        ('{"offline": []}', "{path} has no requests in offline"),
        ("[7]", '{path}, request [0] must be {"prompt": [ids], "max_tokens": n}, got 7'),
        (
            '[{"prompt": [1]}]',
            "{path}, request [0]: max_tokens must be an integer of at least 1, got None",
        ),
        (
            '{"ttft": {"prompt": [], "max_tokens": 1}}',
            "{path}, request ttft[0]: prompt must be a list of token ids, got []",
        ),
        (
            '[{"prompt": [1, -1], "max_tokens": 1}]',
            "{path}, request [0]: prompt must hold token ids of at least 0, got -1",
        ),
        (
            '[{"prompt": [1, true], "max_tokens": 1}]',
            "{path}, request [0]: prompt must hold token ids of at least 0, got True",
        ),
        (
            '[{"prompt": [1], "max_tokens": 0}]',
            "{path}, request [0]: max_tokens must be an integer of at least 1, got 0",
        ),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path: Path, content: str, message: str):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        load_tokens(path)
    assert str(caught.value).startswith("workload.path=" + message.replace("{path}", path))


def test_a_missing_file_ends_the_command_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "absent.json"
    assert run(["bench", "workload=tokens", f"workload.path={path}"]) == 2
    assert capsys.readouterr().err == (
        f"run: workload.path={path} cannot be read: No such file or directory\n"
    )
