"""Hostile requests of the soak test: huge numbers, and texts that take long to compile or render.

The server may answer or refuse them. No answer may be a 5xx other than a 503 with Retry-After.
"""

from __future__ import annotations

import json
import random
from typing import Any

from ostinato.benchmarks.soak.hostile.faults import post

__all__ = ("hostile_constraint", "hostile_template", "huge_number")

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
# Numbers as JSON text, because Python would not write some of them.
_NUMBERS = ("9" * 19, f"-{'9' * 25}", "1" + "0" * 400, "1e308", "1e400", "-0.0", "2.5", "9" * 5000)
_FIELDS = (
    "max_tokens",
    "min_tokens",
    "n",
    "seed",
    "top_k",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "priority",
    "stream_interval",
    "temperature",
    "presence_penalty",
    "repetition_penalty",
)
_LISTS = ("stop_token_ids", "allowed_token_ids", "prompt", "logprob_token_ids")
_KEYWORDS = (
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
)

_DEEP: Any = {"type": "string"}
for _ in range(200):
    _DEEP = {"type": "object", "properties": {"a": _DEEP}, "required": ["a"]}
_CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"regex": "(a|b)?" * 5000},
    {"regex": "(.*a){1,200}" * 4},
    {"regex": "((a{1,99}){1,99}){1,99}"},
    {"regex": "(" * 5000},
    {"grammar": 'start: start start | "a"\n'},
    {"grammar": "start: a\na: b\nb: a\n"},
    {"grammar": "start: /(a|aa)+/ start?\n" * 50},
    {"grammar": "root ::= " + '("a" | "b")? ' * 5000},
    {"json": {"$ref": "#"}},
    {
        "json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    {"json": {"allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(300)]}},
    {"json": {"properties": {f"p{i}": {} for i in range(3000)}, "additionalProperties": False}},
    {"json": {"type": "array", "minItems": 100_000, "items": {"type": "integer"}}},
    {"json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$" * 40}},
    {"json": _DEEP},
    {"choice": [f"choice number {index}" for index in range(4096)]},
    {"structural_tag": {"type": "structural_tag", "format": {"type": "or", "elements": []}}},
)
_MESSAGES = [{"role": "user", "content": "Hi"}]
_TEMPLATES = (
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages | tojson }}" * 20_000,
    "{% if",
)


def huge_number(numbers: random.Random) -> bytes:
    """A request with a number that is huge, a fraction or minus zero, in some field."""
    value = numbers.choice(_NUMBERS)
    kind = numbers.random()
    if kind < 0.5:
        name = numbers.choice(_FIELDS)
        fields = f'"prompt": "Hi", "max_tokens": 2, "{name}": {value}'
        if name == "max_tokens":
            fields = f'"prompt": "Hi", "max_tokens": {value}'
    elif kind < 0.7:
        name = numbers.choice(_LISTS)
        first = "" if name == "prompt" else '"prompt": "Hi", '
        fields = f'{first}"max_tokens": 2, "{name}": [{value}]'
    elif kind < 0.8:
        fields = f'"prompt": "Hi", "max_tokens": 2, "logit_bias": {{"{value}": 1}}'
    else:
        keyword = numbers.choice(_KEYWORDS)
        schema = f'{{"structured_outputs": {{"json": {{"{keyword}": {value}}}}}}}'
        fields = f'"prompt": "Hi", "max_tokens": 2, {schema[1:-1]}'
    return post(_COMPLETIONS, f"{{{fields}}}".encode())


def hostile_constraint(numbers: random.Random) -> bytes:
    """A request with a constraint that is hard, endless or nonsense."""
    constraint = numbers.choice(_CONSTRAINTS)
    if numbers.random() < 0.5:
        body = {"messages": _MESSAGES, "max_tokens": 4, "structured_outputs": constraint}
        return post(_CHAT, json.dumps(body).encode())
    body = {"prompt": "Hi", "max_tokens": 4, "structured_outputs": constraint}
    return post(_COMPLETIONS, json.dumps(body).encode())


def hostile_template(numbers: random.Random) -> bytes:
    """A request with a template that is endless, large, forbidden or nonsense."""
    body = {"messages": _MESSAGES, "max_tokens": 2, "chat_template": numbers.choice(_TEMPLATES)}
    return post(_CHAT, json.dumps(body).encode())
