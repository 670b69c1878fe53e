"""Rewrites the error texts of llguidance for the client that sent the constraint.

llguidance's texts name its own options, positions in generated grammars, and its parser's state.
The client needs the error in the constraint and what to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

__all__ = ("explain", "tokenizer_problem")

_LONGEST = 300  # characters of an explanation
_TOO_LARGE = (
    "it is too large, or repeats too much within repetitions; make it smaller or split it into "
    "several requests"
)
_NO_TEXT = "no text matches it"


class _Class(NamedTuple):
    """Errors with one cause."""

    text: re.Pattern[str]  # matches llguidance's text
    explanation: str | Callable[[re.Match[str]], str]


def _of(text: str, explanation: str | Callable[[re.Match[str]], str]) -> _Class:
    return _Class(re.compile(text, re.DOTALL), explanation)


_CLASSES = (
    # Errors in schemas.
    _of(
        r"Unimplemented keys: \[(.*?)\]",
        lambda found: (
            f"the schema has {found[1]}, which cannot be enforced; leave it out, or set strict to "
            "false to leave it to the model"
        ),
    ),
    _of(
        r"oneOf constraints are not supported",
        "oneOf is enforced only where no answer can fit two of its schemas: they differ in type, "
        "or in the const of a required property; give anyOf, or set strict to false",
    ),
    _of(
        r"min/maxProperties only supported",
        "minProperties and maxProperties are enforced only where all properties that the schema "
        "lists are required; list them in required, or set strict to false",
    ),
    _of(
        r"patternProperty regexes (.*?) and (.*?) are not disjoint",
        lambda found: (
            f"the patternProperties {found[1]} and {found[2]} match a common name; they are "
            "enforced only where each name matches at most one"
        ),
    ),
    _of(
        r"can't determine if patternProperty regexes (.*?) and (.*?) are disjoint",
        lambda found: (
            f"the patternProperties {found[1]} and {found[2]} are too complex to see whether they "
            "match a common name; make them simpler"
        ),
    ),
    _of(
        r"(?:Unsatisfiable schema: )?Regex is empty",
        "no text satisfies a pattern of the schema together with the other keywords for strings",
    ),
    _of(
        r"Unable to determine if regex is empty",
        "a pattern of the schema is too complex together with minLength, maxLength or another "
        "pattern; make it simpler",
    ),
    _of(r"Unsatisfiable schema: (.*)", lambda found: f"no answer satisfies the schema: {found[1]}"),
    _of(
        r"Resource '(.*?)' is not present",
        lambda found: (
            f"$ref or $schema leads to {found[1]}, which is not part of the schema and is not "
            "loaded; copy it into $defs"
        ),
    ),
    _of(
        r"(?:Pointer|Anchor) '(.*?)' .*does not exist|Invalid percent encoding in pointer '(.*?)'",
        lambda found: f"$ref leads to {found[1] or found[2]}, which the schema does not have",
    ),
    _of(
        r"Invalid URI reference '(.*?)'",
        lambda found: f"{found[1]!r} is not a URI; $ref and $id need one",
    ),
    _of(
        r"circular references with sibling keys are not supported: (.*)",
        lambda found: (
            f"the $ref to {found[1].removeprefix('json-schema:///')} leads to itself and has other "
            "keywords beside it; move these keywords into the schema that $ref leads to"
        ),
    ),
    _of(
        r"Schema intersection stack level exceeded",
        "schemas that refer to themselves are combined with each other, by allOf or beside $ref; "
        "write the combined schema out",
    ),
    _of(
        r"schema too large",
        "the schema has more than 50000 parts once references and combinations are written out; "
        "make it smaller",
    ),
    _of(
        r"Failed to generate regex for \w+ range",
        "the bounds of a number cannot be enforced; give bounds with fewer digits",
    ),
    # Limits of work.
    _of(
        r"Current row has \d+ items; max is (\d+)|Too many items \(limit (\d+)",
        lambda found: (
            f"the answer can go on in more than {found[1] or found[2]} ways at one place; allow "
            "fewer alternatives or optional properties, and in a grammar recurse on the left"
        ),
    ),
    _of(
        r"too big \(limit|too many (?:expressions|states)|fuel (?:exhausted|exceeded|\d+ exceeded)|"
        r"exhausted|lexer precomputation failed|exceeds the supported range",
        _TOO_LARGE,
    ),
    _of(r"too deeply nested|recursion depth", "it is nested too deeply; make it flatter"),
    # Errors in regular expressions.
    _of(
        r"lookarounds not supported yet; \w+ in regex /(.*?)/(?: 1 \||$)",
        lambda found: (
            f"the regular expression {_short(found[1])} has a word boundary, or a ^ or $ within "
            "it; these are not supported"
        ),
    ),
    _of(
        r"regex parse error: (.*?) +\^+ +error: ([^|]*?)(?: +\d+ \|.*)?$",
        lambda found: f"the regular expression {_short(found[1])} is not valid: {found[2]}",
    ),
    # Errors in grammars.
    _of(
        r"Failed to convert the grammar from GBNF to Lark: (.*)",
        lambda found: f"it is neither Lark nor GBNF. As GBNF: {found[1]}",
    ),
    _of(
        r"failed to compile JSON schema: (.*?)(?: 1 \||$)",
        lambda found: f"a schema in it cannot be used: {explain(found[1])}",
    ),
    _of(
        r"^(?:at )?(\d+)\((\d+)\): (.*?)(?: 1 \|.*)?$",
        lambda found: f"line {found[1]}, column {found[2]}: {found[3]}",
    ),
    # Errors of the parser.
    _of(r"NoExtensionBias|NoExtension\b|parser stopped", _NO_TEXT),
    _of(r"^panic: ", "the grammar library failed on it; change it"),
)
# Removed from an error that no `_Class` matches: advice on how to call llguidance, and names of its
# options.
_ADVICE = re.compile(
    r"\s*[;,.]?\s*(?:consider|try|either increase|increase|enable|use limits?|see|limit)\b.*$|"
    r"<[^<>]*>|\blimits?\.\w+|\b\w+_\w+\b|'\w+' option",
    re.IGNORECASE | re.DOTALL,
)


def explain(text: str) -> str:
    """The error of a constraint for the client: one line, cut after 300 characters.

    Args:
        text: the message of llguidance's exception, or of a matcher's error.
    """
    line = " ".join(re.split(r"<state>|<backtrace>|<non-verbose/>", text)[0].split())
    for cause in _CLASSES:
        found = cause.text.search(line)
        if found is not None:
            known = cause.explanation
            return _cut(known if isinstance(known, str) else known(found))
    unknown = " ".join(_ADVICE.sub("", line).split())
    return _cut(f"no grammar can be built from it: {unknown or 'the reason is not known'}")


def tokenizer_problem(text: str) -> str:
    """Why llguidance cannot use a `tokenizer.json`: one line, cut after 80 characters."""
    if "decoder type" in text:
        return "its decoder has neither ByteLevel nor ByteFallback"
    return _short(" ".join(text.split()))


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
