"""Sends numbers of many sizes to the places of requests that take a number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import msgspec
import msgspec.inspect as types
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.waiting import PATIENCE_S

__all__ = ("MARK", "SCHEMAS", "Endpoint", "Place", "check_numbers", "places")

MARK = "the number"
_EDGES = [
    sign * ((1 << bits) + step)
    for bits in (0, 31, 32, 53, 63, 64, 128)
    for step in (-1, 0, 1)
    for sign in (1, -1)
]
_TEXTS = ["2.0", "-0.0", "1e400", "-1e400", "1e-400", "0.1", "1E2", "9" * 400, "9" * 5000, "1e19"]
_NUMBERS = st.one_of(
    st.sampled_from(_EDGES).map(str), st.sampled_from(_TEXTS), st.integers().map(str)
)


_TYPES_OF_COUNTS = {"Items": "array", "Length": "string", "Properties": "object"}
SCHEMAS: dict[str, dict[str, Any]] = {
    **{
        f"{which}{what}": {"type": kind, f"{which}{what}": MARK}
        for which in ("min", "max")
        for what, kind in _TYPES_OF_COUNTS.items()
    },
    **{
        f"{keyword} of {kind}": {"type": kind, keyword: MARK}
        for keyword in (
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "multipleOf",
            "const",
        )
        for kind in ("number", "integer")
    },
    "enum": {"enum": [MARK, "a", {"b": MARK}]},
    "a property": {"properties": {"a": {"maximum": MARK}}, "required": ["a"]},
    "an annotation": {"type": "null", "default": MARK, "x-other": {"maximum": MARK}},
    **{
        f"wrong {keyword}": {keyword: MARK}
        for keyword in (
            "type",
            "required",
            "properties",
            "items",
            "pattern",
            "format",
            "$ref",
            "anyOf",
        )
    },
}
"""Name -> JSON schema, in which MARK stands for a number."""


class Endpoint(NamedTuple):
    """An endpoint: its path, the schema of its bodies and one body."""

    path: str
    schema: type[msgspec.Struct]
    body: dict[str, Any]  # a small body that the endpoint accepts


class Place(NamedTuple):
    """A place for a number: a part of a body, in which `MARK` stands for the number."""

    endpoint: Endpoint
    name: str
    fields: dict[str, Any]


def places(endpoint: Endpoint) -> list[Place]:
    """The places of an endpoint's schema that take a number or any JSON, at most 4 structs deep."""
    found = []
    for field in types.type_info(endpoint.schema).fields:  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in _places(field.type, 0):
            found.append(Place(endpoint, field.encode_name + name, {field.encode_name: value}))
    return found


def _places(kind: types.Type, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(kind, types.Metadata):
        yield from _places(kind.type, depth)
    elif isinstance(kind, types.IntType | types.FloatType | types.AnyType):
        yield "", MARK
    elif isinstance(kind, types.UnionType):
        for one in kind.types:
            yield from _places(one, depth)
    elif isinstance(kind, types.ListType | types.VarTupleType):
        for name, value in _places(kind.item_type, depth):
            yield f"[0]{name}", [value]
    elif isinstance(kind, types.DictType):
        key: Any = "1" if isinstance(_plain(kind.key_type), types.IntType) else "a"
        for name, value in _places(kind.value_type, depth):
            yield f".{key}{name}", {key: value}
        if key == "1":
            yield ".key", {MARK: _sample(kind.value_type)}
    elif isinstance(kind, types.StructType) and depth < 4:
        tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
        for field in kind.fields:
            others = {
                one.encode_name: _sample(one.type)
                for one in kind.fields
                if one.required and one is not field
            }
            for name, value in _places(field.type, depth + 1):
                yield f".{field.encode_name}{name}", {**tag, **others, field.encode_name: value}


def _plain(kind: types.Type) -> types.Type:
    return _plain(kind.type) if isinstance(kind, types.Metadata) else kind


def _sample(kind: types.Type) -> Any:
    """The simplest value of a type."""
    kind = _plain(kind)
    if isinstance(kind, types.UnionType):
        return _sample(kind.types[0])
    if isinstance(kind, types.LiteralType):
        return kind.values[0]
    if isinstance(kind, types.StructType):
        tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
        required = {one.encode_name: _sample(one.type) for one in kind.fields if one.required}
        return {**tag, **required}
    simple: dict[type, Any] = {
        types.StrType: "a",
        types.IntType: 1,
        types.FloatType: 1.0,
        types.BoolType: False,
        types.ListType: [],
        types.DictType: {},
    }
    return simple.get(type(kind))


def send(client: httpx.Client, place: Place, number: str) -> httpx.Response:
    """Send a number. The status must be 200, 400 with an error, or 504 for `deadline_ms`."""
    body = json.dumps({**place.endpoint.body, **place.fields})
    if f'"{MARK}":' in body:  # the number is the key of a map
        body = body.replace(MARK, number)
    body = body.replace(f'"{MARK}"', number)
    answer = client.post(
        place.endpoint.path, content=body, headers={"Content-Type": "application/json"}
    )
    what = f"{place.endpoint.path} {place.name}={number[:80]}: {answer.text[:500]}"
    if answer.status_code == 504:
        assert place.name == "deadline_ms", what
    elif answer.status_code != 200:
        assert answer.status_code == 400, what
        assert answer.json()["error"]["message"], what
    return answer


def check_numbers(url: str, where: list[Place], max_examples: int) -> None:
    """Send a number beyond 64 bits to every place, and random numbers to random places."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        for place in where:
            send(client, place, str(10**30))

        @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(place=st.sampled_from(where), number=_NUMBERS)
        def check(place: Place, number: str) -> None:
            send(client, place, number)

        check()
