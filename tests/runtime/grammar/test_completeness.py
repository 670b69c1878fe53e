"""Constraints allow every valid answer and no invalid one, compared with `jsonschema`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ostinato
from ostinato.benchmarks.grammars.schema_suite import DocumentWriter, count, demo_builder
from ostinato.runtime.grammar.matcher import build_matcher, problem
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

BUILDER = demo_builder()
WRITER = DocumentWriter(BUILDER.tokenizer)
COUNTS = Path(ostinato.__file__).parents[1] / "benchmarks" / "results" / "schema-suite.json"
SOURCE = "jsonschema==4.26.0"  # its source archive has the JSON-Schema-Test-Suite
END_IDS = [0, 2]

NAMES = st.sampled_from(["a", "b", "ab", "ä", 'c"', "d\ne"])
TEXTS = st.one_of(
    NAMES, st.sampled_from(["", "aab", "x-1", "2024-02-29", "\u2028", "€😀", "\\u0061"])
)
NUMBERS = st.one_of(
    st.integers(-12, 12),
    st.sampled_from([0.5, -0.5, 1.0, 2.5, -2.0, 0.1, 10.25, 99, 100, 1e3, 12345678901234]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=2)),
    max_leaves=4,
)
# Patterns that mean the same in ECMA-262 and in Python's `re`, which the validator uses.
PATTERNS = st.sampled_from(
    ["^a", "b$", "^[ab]*$", "a|b", "^(ab|a)$", r"^[\dab]+$", r"\d", r"^\S*$", "[^a]", "ä", "^a|b$"]
)
SIZES = st.sampled_from([0, 1, 2, 2.0, 3, 10**12])


def some_of(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def typed(kind: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return some_of(**keywords).map(lambda found: {"type": kind, **found})


LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {}, True, False]),
    *(
        typed(
            kind,
            minimum=NUMBERS,
            maximum=NUMBERS,
            exclusiveMinimum=NUMBERS,
            exclusiveMaximum=NUMBERS,
            multipleOf=st.sampled_from([1, 2, 3, 0.5, 0.25]),
        )
        for kind in ("integer", "number")
    ),
    typed("string", minLength=SIZES, maxLength=SIZES, pattern=PATTERNS),
    typed("string", format=st.sampled_from(["date", "uuid", "ipv6"])),
    st.builds(lambda value: {"const": value}, VALUES),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.just({"$ref": "#/$defs/shared"}),
)


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        typed("array", items=inner, prefixItems=several, minItems=SIZES, maxItems=SIZES),
        typed(
            "object",
            properties=st.dictionaries(NAMES, inner, max_size=3),
            required=st.lists(NAMES, max_size=2, unique=True),
            additionalProperties=inner,
            patternProperties=st.dictionaries(PATTERNS, inner, max_size=1),
            minProperties=SIZES,
            maxProperties=SIZES,
        ),
        *(
            several.map(lambda found, name=name: {name: found})
            for name in ("anyOf", "allOf", "oneOf")
        ),
    )


SCHEMAS = st.builds(
    lambda schema, shared: {**schema, "$defs": {"shared": shared}},
    st.recursive(LEAVES, _deeper, max_leaves=5).filter(lambda schema: isinstance(schema, dict)),
    st.sampled_from([{"type": "string", "maxLength": 2}, {"type": "integer"}, True]),
)


def plausible(schema: Any, shared: Any) -> st.SearchStrategy[Any]:
    """Random documents, many of which are valid for the schema."""
    if not isinstance(schema, dict):
        return VALUES
    if "$ref" in schema:
        return plausible(shared, shared)
    options = [VALUES]
    for name in ("anyOf", "allOf", "oneOf"):
        options += [plausible(one, shared) for one in schema.get(name, ())]
    if "const" in schema:
        options.append(st.just(schema["const"]))
    options += [st.just(value) for value in schema.get("enum", ())]
    if schema.get("type") == "array":
        items = plausible(schema.get("items"), shared)
        first = [plausible(one, shared) for one in schema.get("prefixItems", ())]
        options.append(
            st.tuples(st.tuples(*first), st.lists(items, max_size=2)).map(
                lambda two: [*two[0], *two[1]]
            )
        )
    if schema.get("type") == "object":
        listed = {
            name: plausible(one, shared) for name, one in schema.get("properties", {}).items()
        }
        required = {name: VALUES for name in schema.get("required", ()) if name not in listed}
        others = st.dictionaries(
            NAMES, plausible(schema.get("additionalProperties"), shared), max_size=1
        )
        options.append(
            st.builds(
                lambda known, more: {**more, **known},
                st.one_of(
                    st.fixed_dictionaries({**listed, **required}),
                    st.fixed_dictionaries(required, optional=listed),
                ),
                others,
            )
        )
    return st.one_of(options)


def is_valid(document: Any, schema: Any) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(document)


def random_text(matcher: Any, seed: int) -> str | None:
    """A text of at most 60 tokens, drawn uniformly from the allowed ones.

    None if the grammar does not accept the text.
    """
    choose, token_ids = random.Random(seed), []
    while not matcher.is_stopped() and len(token_ids) < 60:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_accepting() and choose.random() < 0.5:
            break
        allowed = np.setdiff1d(np.flatnonzero(bits), END_IDS)
        if not len(allowed):
            break
        token_ids.append(int(choose.choice(allowed)))
        assert matcher.consume_token(token_ids[-1])
    assert problem(matcher) is None
    return BUILDER.tokenizer.decode_str(token_ids) if matcher.is_accepting() else None


def check(schema: dict[str, Any], data: st.DataObject) -> None:
    answer = BUILDER.answer(StructuredOutputsParams(json=schema))
    if answer.error:
        assert answer.error.startswith("structured_outputs cannot be used: ")
        assume(False)
    matcher = build_matcher(BUILDER.tokenizer, answer.grammar)
    for document in data.draw(st.lists(plausible(schema, schema["$defs"]["shared"]), max_size=6)):
        text = WRITER.write(matcher, document)
        assert (text is not None) == is_valid(document, schema), (document, text)
    for seed in range(3):
        text = random_text(matcher.deep_copy(), seed)
        assert text is None or is_valid(json.loads(text), schema), text


def _property(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    given_them = given(schema=SCHEMAS, data=st.data())
    run = settings(
        max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: run(given_them(test))


@_property(max_examples=60)
def test_a_document_can_be_written_if_it_is_valid(schema, data):
    check(schema, data)


@pytest.mark.slow
@_property(max_examples=4000)
def test_many_documents(schema, data):
    check(schema, data)


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=8, unique=True))
@settings(max_examples=60, deadline=None)
def test_every_choice_can_be_written(words):
    """Each choice can be written, even if another choice begins with it. No other text can."""
    words = [*words, words[0] + "x", words[0] + "xy"]
    answer = BUILDER.answer(StructuredOutputsParams(choice=tuple(words)))
    assert not answer.error
    matcher = build_matcher(BUILDER.tokenizer, answer.grammar)
    for text in (*words, *(word[:-1] for word in words), *(f"{word}x" for word in words)):
        after = WRITER.after(matcher, text)
        assert (after is not None and after.is_accepting()) == (text in words)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the JSON-Schema-Test-Suite, a part of the source archive of `jsonschema`."""
    directory = tmp_path_factory.mktemp("suite")
    command = ["download", "-q", "--no-deps", "--no-binary", "jsonschema", "-d", str(directory)]
    run = subprocess.run(
        [sys.executable, "-m", "pip", *command, SOURCE], capture_output=True, text=True, check=False
    )
    if run.returncode:
        pytest.skip(f"no package index gives {SOURCE}: {run.stderr[-200:]}")
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(directory, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz")) / "json"


@pytest.mark.slow
def test_the_suite(suite):
    """For each accepted schema exactly the valid documents can be written.

    The numbers of accepted schemas and tests are those in the file `COUNTS`.
    """
    found = count(suite)
    assert found["wrong"] == []
    assert found["drafts"] == json.loads(COUNTS.read_text())["drafts"]
