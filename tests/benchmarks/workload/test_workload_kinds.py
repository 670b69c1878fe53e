"""Synthetic workloads and files of other projects; a bad file gives an error of one line."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.benchmarks.workload.select import fit_parts, one_part, read_parts
from ostinato.benchmarks.workload.workload import Part, WorkItem
from ostinato.conf.errors import ConfigError
from ostinato.conf.sections.bench_schema import WorkloadKind, WorkloadSection

VOCABULARY = 1000


def only(**fields: object) -> Part:
    fields["kind"] = WorkloadKind(fields["kind"])
    section = WorkloadSection(**fields)  # type: ignore[arg-type]
    [part] = read_parts(section, VOCABULARY, lambda text: [len(word) for word in text.split()])
    return part


def write(tmp_path: Path, content: str) -> str:
    file = tmp_path / "work"
    file.write_text(content)
    return str(file)


def test_random_lengths_lie_within_the_spread_and_follow_the_seed():
    fields = {"num_requests": 200, "input_len": 100, "output_len": 20, "length_spread": 0.5}
    part = only(kind="random", seed=3, **fields)
    lengths = [len(item.prompt) for item in part.items]
    outputs = [item.max_tokens for item in part.items]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert (min(outputs), max(outputs)) == (10, 30)
    assert part.max_id == VOCABULARY - 1
    assert only(kind="random", seed=3, **fields) == part
    assert only(kind="random", seed=4, **fields) != part


def test_fixed_lengths():
    part = only(kind="fixed", num_requests=3, input_len=7, output_len=2)
    assert [(len(item.prompt), item.max_tokens) for item in part.items] == [(7, 2)] * 3
    assert len({tuple(item.prompt) for item in part.items}) == 3


def test_prompts_share_a_few_beginnings():
    part = only(kind="prefix", num_requests=60, num_prefixes=3, prefix_len=32, input_len=8)
    assert len({tuple(item.prompt[:32]) for item in part.items}) == 3
    assert len({tuple(item.prompt[32:]) for item in part.items}) == 60
    assert {len(item.prompt) for item in part.items} == {40}


def test_turns_follow_each_other():
    part = only(kind="conversations", num_requests=2, turns=3, input_len=5, think_time_s=0.5)
    assert [item.after for item in part.items] == [None, 0, 1, None, 3, 4]
    assert [item.think_s for item in part.items] == [0, 0.5, 0.5] * 2
    assert part.waves() == [[0, 3], [1, 4], [2, 5]]
    assert part.longest() == 3 * (5 + 64)


def test_rotated_ids_keep_what_is_shared():
    part = only(kind="prefix", num_requests=10, num_prefixes=2, prefix_len=8, input_len=4)
    rotated = part.rotated(1, VOCABULARY)
    assert part.rotated(0, VOCABULARY).items == part.items
    assert not {tuple(i.prompt[:8]) for i in part.items} & {
        tuple(i.prompt[:8]) for i in rotated.items
    }
    assert len({tuple(i.prompt[:8]) for i in rotated.items}) == len(
        {tuple(i.prompt[:8]) for i in part.items}
    )


SHAREGPT = [
    {"conversations": [{"from": "human", "value": "a bb ccc dddd"}]},
    {"conversations": [{"value": "a bb ccc dddd"}, {"value": "one two three four five"}]},
    {"conversations": [{"value": "short"}, {"value": "one two three four five"}]},
]


def test_sharegpt_takes_first_questions_and_the_lengths_of_their_answers(tmp_path: Path):
    path = write(tmp_path, json.dumps(SHAREGPT))
    assert only(kind="sharegpt", path=path).items == [WorkItem([1, 2, 3, 4], 5)]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.1805900,10,3
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
7,ChatGPT,20,0,20,Conversation log
45.5,GPT-4,30,2,32,API log
"""
MOONCAKE = "\n".join(
    json.dumps(line)
    for line in (
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 1000, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 9]},
        {"timestamp": 1500, "input_length": 30, "output_length": 7},
    )
)
OURS = json.dumps(
    {"timestamp": 1, "input_length": 7, "output_length": 2, "hash_ids": [4], "block_size": 4}
)


AZURE_2024 = """TIMESTAMP, ContextTokens, GeneratedTokens
2024-05-12 00:00:00.500000+00:00,274,15
2024-05-12 00:00:01+00:00,25,6
2024-05-12 02:00:02.250000+02:00,24,5
2024-05-12 00:00:03.7500000,23,4
"""
BURSTGPT_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,90,44,134,Conversation log
19440192.0,a5c6,2,ChatGPT,36,29,65,Conversation log
"""


def test_times_with_and_without_an_offset_are_on_one_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        items = only(kind="trace", path=write(tmp_path, AZURE_2024)).items
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [i.arrival_s for i in items] == pytest.approx([0, 0.5, 1.75, 3.25])
    assert [len(i.prompt) for i in items] == [274, 25, 24, 23]


def test_a_burstgpt_trace_with_sessions(tmp_path: Path):
    items = only(kind="trace", path=write(tmp_path, BURSTGPT_2)).items
    assert [(len(i.prompt), i.max_tokens, i.arrival_s) for i in items] == [
        (90, 44, 0),
        (36, 29, 82),
    ]


def test_an_azure_trace(tmp_path: Path):
    items = only(kind="trace", path=write(tmp_path, AZURE)).items
    assert [(len(i.prompt), i.max_tokens) for i in items] == [(374, 44), (10, 3)]
    assert [i.arrival_s for i in items] == [0, pytest.approx(1.5)]


def test_a_burstgpt_trace_without_the_requests_that_failed(tmp_path: Path):
    items = only(kind="trace", path=write(tmp_path, BURSTGPT), time_scale=0.5).items
    assert [(len(i.prompt), i.max_tokens, i.arrival_s) for i in items] == [
        (472, 18, 0),
        (30, 2, 20.25),
    ]


def test_a_mooncake_trace_shares_what_its_hashes_share(tmp_path: Path):
    items = only(kind="trace", path=write(tmp_path, MOONCAKE)).items
    assert [(len(i.prompt), i.max_tokens, i.arrival_s) for i in items] == [
        (1030, 6, 0),
        (30, 7, 0.5),
        (1100, 5, 2),
    ]
    first, _, last = items
    assert first.prompt[:1024] == last.prompt[:1024]
    assert first.prompt[1024:1030] != last.prompt[1024:1030]


def test_our_own_trace_states_its_block_size(tmp_path: Path):
    path = write(tmp_path, OURS + "\n" + OURS)
    first, second = only(kind="trace", path=path).items
    assert len(first.prompt) == 7
    assert first.prompt[:4] == second.prompt[:4]
    assert first.prompt[4:] != second.prompt[4:]


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("trace", "", "{path} is empty"),
        ("trace", "a,b\n1,2\n", "{path} is not a trace: it must be CSV with TIMESTAMP"),
        ("trace", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "{path} has no request with"),
        (
            "trace",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n",
            "{path}, line 2: TIMESTAMP must be seconds or a date, got 'noon'",
        ),
        (
            "trace",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1,x,2\n",
            "{path}, line 2: ContextTokens must be a number, got 'x'",
        ),
        (
            "trace",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnan,1,2\n",
            "{path}, line 2: TIMESTAMP must be seconds or a date, got 'nan'",
        ),
        (
            "trace",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1,inf,2\n",
            "{path}, line 2: ContextTokens must be a number, got 'inf'",
        ),
        (
            "trace",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1,1e15,2\n",
            "{path}, line 2: ContextTokens must be a number of tokens, got '1e15'",
        ),
        (
            "trace",
            f"TIMESTAMP,ContextTokens,GeneratedTokens\n{'1' * 200_000},1,2\n",
            "{path} is not CSV: field larger than",
        ),
        ("trace", '{"timestamp": 1', "{path}, line 1 is not JSON: "),
        (
            "trace",
            '{"timestamp": NaN, "input_length": 2, "output_length": 1}',
            "{path}, line 1: timestamp must be a number, got nan",
        ),
        (
            "trace",
            f'{{"timestamp": 1, "input_length": {"9" * 400}, "output_length": 1}}',
            "{path}, line 1: input_length must be a number, got 9",
        ),
        ("trace", "[1]", "{path}, line 1 must be an object, got [1]"),
        (
            "trace",
            '{"timestamp": 1, "input_length": 2}',
            "{path}, line 1: output_length must be a number, got None",
        ),
        (
            "trace",
            '{"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": "x"}',
            "{path}, line 1: hash_ids must be a list of integers, got 'x'",
        ),
        ("sharegpt", "{}", '{path} must hold a list of {"conversations"'),
        ("sharegpt", "[1]", "{path}, entry [0] must have a list named conversations, got 1"),
        ("sharegpt", '[{"conversations": [{"value": 1}]}]', "{path}, entry [0]: a turn must be"),
        ("sharegpt", '[{"conversations": []}]', "{path} has no conversation with a question"),
        ("sharegpt", "[", "{path} is not JSON: "),
        ("sharegpt", "[" * 200_000, "{path} is not JSON: "),
        ("sharegpt", " ", "{path} is empty"),
        ("tokens", "", "{path} is empty"),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path: Path, kind: str, content: str, message: str):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        only(kind=kind, path=path)
    assert str(caught.value).startswith("workload.path=" + message.replace("{path}", path))
    assert "\n" not in str(caught.value)


CELLS = st.sampled_from(
    ["1", "0", "-2", "1.5", "nan", "1e400", "", '"', "noon", "2023-11-16 18:15:46.6", "null", "é"]
)
HEADS = ("TIMESTAMP,ContextTokens,GeneratedTokens", "Timestamp,Request tokens,Response tokens")
ROWS = st.lists(st.lists(CELLS, max_size=4).map(",".join), max_size=4).map("\n".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "timestamp",
                    "input_length",
                    "output_length",
                    "hash_ids",
                    "block_size",
                    "conversations",
                    "value",
                    "prompt",
                    "max_tokens",
                    "offline",
                ]
            ),
            inner,
        )
    ),
).map(json.dumps)


@given(
    kind=st.sampled_from(["sharegpt", "trace", "tokens"]),
    content=st.builds("{}\n{}".format, st.sampled_from(HEADS), ROWS) | JSON | st.text(max_size=20),
)
@settings(deadline=None)
def test_any_file_is_a_workload_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, kind: str, content: str
):
    path = tmp_path_factory.getbasetemp() / "any-workload"
    path.write_text(content, encoding="utf-8", errors="replace")
    problem = ""
    try:
        part = only(kind=kind, path=str(path), num_requests=3)
        assert all(item.prompt and item.max_tokens > 0 for item in part.items)
    except ConfigError as error:
        problem = str(error)
    assert not problem or problem.startswith(f"workload.path={path}")
    assert "\n" not in problem


@pytest.mark.parametrize("kind", ["sharegpt", "trace", "tokens"])
def test_a_file_that_is_missing_or_not_named(tmp_path: Path, kind: str):
    with pytest.raises(ConfigError, match=r"workload\.path=.* cannot be read: No such file"):
        only(kind=kind, path=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=f"workload={kind} needs a file: workload.path=FILE"):
        only(kind=kind)


def test_a_path_that_nothing_reads_is_refused():
    with pytest.raises(ConfigError, match="workload=random reads no file; choose"):
        only(kind="random", path="x")


def test_what_is_too_long_is_left_out_with_the_turns_after_it():
    items = [WorkItem([1] * 4, 4), WorkItem([1] * 90, 4, after=0), WorkItem([1], 1, after=1)]
    items += [WorkItem([2] * 9, 1), WorkItem([3], 1, after=3)]
    [part], notes = fit_parts([Part("x", items)], model="m", max_model_len=50, vocab_size=10)
    assert [item.after for item in part.items] == [None, None, 1]
    assert notes == ["x: 2 of 5 requests left out, longer than the context of 50"]
    with pytest.raises(ConfigError, match="the workload does not fit m: x left out"):
        fit_parts([Part("x", [WorkItem([1] * 60, 1)])], model="m", max_model_len=50, vocab_size=10)


def test_a_server_is_loaded_with_the_offline_part():
    parts = read_parts(WorkloadSection(), 50_000)
    assert one_part(parts).name == "offline"
