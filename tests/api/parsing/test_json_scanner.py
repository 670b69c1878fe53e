"""The scanner and the `json` module find the same end of an object, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.api.parsing.json_scanner import MAX_DEPTH, JsonScanner, JsonState

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def scan(text: str, piece_len: int = 1) -> tuple[JsonState, int]:
    scanner = JsonScanner()
    state = JsonState.open
    for end in range(piece_len, len(text) + piece_len, piece_len):
        state = scanner.scan(text[:end])
        if state is not JsonState.open:
            break
    return state, scanner.end


@given(
    st.dictionaries(st.text(max_size=4), values, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
)
@settings(max_examples=150, deadline=None)
def test_every_object(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    for piece_len in (1, 3, len(text) + 1):
        assert scan(text + " rest", piece_len) == (JsonState.done, len(text))
    for cut in range(1, len(text)):
        assert scan(text[:cut], 100_000)[0] is JsonState.open


@given(st.text(alphabet='{}[]:,"\\ 1e-.tnu', max_size=12))
@settings(max_examples=300, deadline=None)
def test_what_is_not_json_is_never_done(text):
    state, end = scan("{" + text, 1)
    assert scan("{" + text, 100_000)[0] is state
    if state is JsonState.done:
        json.loads(("{" + text)[:end])


@pytest.mark.parametrize(
    "text",
    [
        '{"a" 1 ',
        '{"a":}',
        '{"a":1,}',
        "{1 ",
        "[1 2 ",
        '{"a":tru }',
        "[01,",
        '["\\x',
        "[}",
        '{"a":[1}',
        "x ",
        '"a"',
        "1 ",
    ],
)
def test_broken_json_is_reported_at_once(text):
    assert scan(text)[0] is JsonState.broken


def test_line_ends_within_strings_are_accepted():
    assert scan('{"a": "x\ny"}')[0] is JsonState.done


def test_depth_has_a_limit():
    assert scan("[" * MAX_DEPTH)[0] is JsonState.open
    assert scan("[" * (MAX_DEPTH + 1))[0] is JsonState.broken


def test_the_first_key():
    scanner = JsonScanner()
    scanner.scan('[{"na')
    assert scanner.first_key is None
    scanner.scan('[{"name": 1')
    assert scanner.first_key == (2, 8)
