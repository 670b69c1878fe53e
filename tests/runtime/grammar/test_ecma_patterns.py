"""Patterns of JSON schemas mean what ECMA-262 says, in the grammar that is made from them."""

from __future__ import annotations

import pytest

from ostinato.benchmarks.grammars.schema_suite import DocumentWriter, demo_builder
from ostinato.runtime.grammar.ecma_patterns import to_rust
from ostinato.runtime.grammar.matcher import build_matcher
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

BUILDER = demo_builder()
WRITER = DocumentWriter(BUILDER.tokenizer)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"^\s$", "\ufeff\u2003\v\t ", "\x85a"),
        (r"^\S$", "a\x85€", "\ufeff\u2003\n"),
        (r"^[\s\S]$", "a\n\ufeff", []),
        (r"^[^\s]$", "a", "\ufeff "),
        (r"^.$", "a😀\x85", "\n\r\u2028\u2029"),
        (r"^\d$", "07", "a٣"),
        (r"^\w$", "aZ_0", "ä-"),
        (r"^\W$", "ä-", "a_"),
        (r"^[\w-]$", "a-", "+"),
        (r"^[a\-z]$", "a-z", "b"),
        (r"^[+--]$", "+,-", "*."),
        (r"^[[]$", "[", "]"),
        (r"^[a[b]c]$", ["ac]", "[c]", "bc]"], ["c", "a"]),
        (r"^[a&&b]$", "a&b", "c"),
        (r"^[a~~b]$", "a~b", "c"),
        (r"^[\]\\^]$", "]\\^", "["),
        (r"^[^]$", "a\n", []),
        (r"^[\b]$", "\b", "b"),
        (r"^\cA\cz$", ["\x01\x1a"], ["cz"]),
        (r"^\u0041\x42\u{43}\0$", ["ABC\0"], ["ABC"]),
        (r"^\ud83d\ude00[\ud83d\ude00-\ud83d\ude02]$", ["😀😁"], ["😀😃"]),
        (r"^\/\<\>\-\$$", ["/<>-$"], ["/<>-"]),
        (r"^\p{Lu}$", "AÄ", "aä"),
        (r"^(?:a|b){2}(?<c>c)?$", ["ab", "bac"], ["a", "abcc"]),
        (r"^a$", "a", ["a\n", "\na"]),
        (r"a|b$", ["a", "xay", "xb"], ["bx", "x"]),
    ],
)
def test_what_it_matches(pattern, matching, others):
    answer = BUILDER.answer(StructuredOutputsParams(json={"type": "string", "pattern": pattern}))
    assert not answer.error
    matcher = build_matcher(BUILDER.tokenizer, answer.grammar)
    for text in matching:
        assert WRITER.write(matcher, text) is not None, text
    for text in others:
        assert WRITER.write(matcher, text) is None, text


@pytest.mark.parametrize(
    "pattern", ["[a", "a\\", r"\a", r"\Z", r"\_a", r"\ud83d", r"[\ude00]", r"\u{110000}"]
)
def test_what_is_not_ecma(pattern):
    if pattern == r"\_a":  # the escape of a character that is no letter and no digit
        assert to_rust(pattern) == "_a"
        return
    with pytest.raises(ValueError, match="the pattern"):
        to_rust(pattern)
