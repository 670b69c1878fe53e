"""Errors of llguidance are put into words that the sender of a request knows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.benchmarks.grammars.schema_suite import demo_builder
from ostinato.runtime.grammar.library_errors import explain, tokenizer_problem
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

BUILDER = demo_builder()
# Names in llguidance's texts that mean nothing to a client: its options, states and markers.
FOREIGN = re.compile(
    r"coerce_one_of|lenient|\blimits\.|_fuel|max_items|precompute|<[a-z-]+/?>|NoExtension|Lexeme|"
    r"Option\(|Some\(|json-schema:///|ff_tokens|backtrace|python|rust",
    re.IGNORECASE,
)


def object_of(count: int) -> dict[str, Any]:
    values = [str(index) for index in range(20)]
    return {
        "type": "object",
        "properties": {f"p{index}": {"enum": values} for index in range(count)},
    }


LOOP = {"type": "object", "properties": {"c": {"$ref": "#/$defs/a"}}}
OTHER_LOOP = {"type": "object", "properties": {"c": {"$ref": "#/$defs/b"}}}
CONSTRAINTS = [
    ({"regex": "(?=a)"}, "the regular expression (?=a) is not valid: look-around"),
    ({"regex": "["}, "unclosed character class"),
    ({"regex": "(" * 5000 + ")" * 5000}, "..."),
    ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, "repeats too much"),
    ({"regex": r"\bfoo\b"}, "has a word boundary"),
    ({"regex": r"[^\x00-\x{10FFFF}]"}, "no text matches it"),
    ({"regex": ""}, "it matches only the empty text; make it match at least one character"),
    ({"grammar": "what"}, "neither Lark nor GBNF"),
    ({"grammar": "start: nothing"}, 'line 1, column 8: unknown name: "nothing"'),
    ({"grammar": "root ::= " + "(" * 2000}, "nested too deeply"),
    ({"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, "nested too deeply"),
    ({"grammar": 'start: %json {"type": "foo"}'}, "a schema in it cannot be used"),
    ({"grammar": "start: <|foo|>"}, "unknown special token"),
    ({"grammar": "start: @foo"}, "unknown grammar"),
    ({"json": {"uniqueItems": True}}, 'the schema has "uniqueItems", which cannot be enforced'),
    ({"json": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "oneOf is enforced only"),
    ({"json": {"$ref": "#"}}, "no text matches it"),
    ({"json": {"$ref": "file:///etc/passwd"}}, "leads to file:///etc/passwd, which is not part"),
    ({"json": {"$ref": "#/$defs/no"}}, "leads to /$defs/no, which the schema does not have"),
    ({"json": {"$ref": "#no"}}, "no"),
    ({"json": {"$ref": "\x00"}}, "is not a URI"),
    ({"json": {"anyOf": []}}, "no answer satisfies the schema: anyOf is empty"),
    ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "minimum (3) is greater"),
    ({"json": {"type": "string", "pattern": "a", "const": "b"}}, "no text satisfies a pattern"),
    ({"json": {"type": "string", "pattern": "(?=a)"}}, "look-around"),
    ({"json": {"patternProperties": {"a": {}, "aa": {}}}}, "match a common name"),
    (
        {"json": {"type": "string", "pattern": "a.{1000}b.{1000}c", "minLength": 3000}},
        "too complex together with",
    ),
    (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"minLength": 1, "$ref": "#/$defs/a"}}}},
        "leads to itself and has other keywords",
    ),
    (
        {
            "json": {
                "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                "$defs": {"a": LOOP, "b": OTHER_LOOP},
            }
        },
        "schemas that refer to themselves are combined",
    ),
    ({"json": {"anyOf": [object_of(30) for _ in range(100)]}}, "more than 20000 ways"),
    ({"json": {**object_of(3), "minProperties": 1}}, "minProperties and maxProperties"),
    ({"structural_tag": {"format": {"type": "regex", "pattern": "["}}}, "unclosed"),
]
# Texts of the library that no constraint above causes.
TEXTS = [
    "initial lexer configuration (grammar) too big (limit for this grammar: 1000000)",
    "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable "
    "limits.precompute_large_lexemes",
    "fuel exhausted when checking relevance of lexemes (12)",
    "maximum relevance check fuel 12 exceeded",
    "DNF too large, fuel exhausted",
    "grammar size (number of symbols) too big (limit for this grammar: 5)",
    "lexer error: too many states: 250000 >= 250000\n<non-verbose/>",
    "Current row has 2001 items; max is 2000; consider making your grammar left-recursive if it's "
    "right-recursive",
    "Failed to generate regex for float range: min=Some(-9.7e26), max=None",
    "can't determine if patternProperty regexes /a/ and /b/ are disjoint",
    "minLength (5) exceeds the supported range",
    "panic: attempt to divide by zero\n<backtrace>\n0: rust\n</backtrace>",
    "NoExtensionBias\n<non-verbose/>",
    "Internal error: x\n<state>\nTokens: 1\n</state>",
    "something new happened; consider setting limits.max_items_in_row to Some(5) <non-verbose/>",
]


@pytest.mark.parametrize(("constraint", "part"), CONSTRAINTS, ids=lambda value: str(value)[:40])
def test_constraints(constraint, part):
    error = BUILDER.answer(StructuredOutputsParams(**constraint)).error
    subject, _, text = error.partition(": ")
    assert subject == "structured_outputs cannot be used"
    assert part in text
    assert not FOREIGN.search(text)
    assert len(error) < 400
    assert "\n" not in error


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:30])
def test_texts(text):
    assert not FOREIGN.search(explain(text))


@given(st.lists(st.sampled_from([*TEXTS, "a", ";", "consider b", "<c/>", "d_e", "\n"]), max_size=4))
def test_any_text(texts):
    explained = explain(" ".join(texts))
    assert len(explained) > 10
    assert "\n" not in explained
    assert not re.search(r"<[a-z-]+/?>|limits\.|_fuel", explained)


def test_a_tokenizer():
    text = 'can\'t determine decoder type: Some(Sequence(Sequence { decoders: [Fuse("x")] }))'
    assert tokenizer_problem(text) == "its decoder has neither ByteLevel nor ByteFallback"
