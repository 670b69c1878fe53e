"""JSON schemas with valid and invalid documents, for comparing grammar libraries."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ("SCHEMAS", "Case")


class Case(NamedTuple):
    """One schema; the documents are JSON texts."""

    name: str
    schema: Any
    valid: tuple[str, ...]
    invalid: tuple[str, ...]


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
        **more,
    }


_PERSON = _object(
    {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "name",
    "age",
)
_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": _object(
            {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            }
        )
    },
}
_SHAPES = {
    "oneOf": [
        _object({"kind": {"const": "circle"}, "radius": {"type": "number"}}),
        _object({"kind": {"const": "square"}, "side": {"type": "number"}}),
    ]
}
_WEATHER = _object(
    {
        "location": {"type": "string", "description": "City and country"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 7},
    }
)
_BIG = _object({f"field_{index}": {"type": ["string", "null"]} for index in range(120)}, "field_0")

SCHEMAS = (
    Case("integer", {"type": "integer"}, ("0", "-17"), ("1.5", '"1"')),
    Case("number", {"type": "number"}, ("0.5", "-1e9"), (".5", "true")),
    Case("boolean or null", {"type": ["boolean", "null"]}, ("true", "null"), ("0",)),
    Case(
        "string lengths",
        {"type": "string", "minLength": 2, "maxLength": 4},
        ('"ab"', '"äöü"'),
        ('"a"', '"abcde"'),
    ),
    Case("enum", {"enum": ["red", 1, None, {"a": []}]}, ('"red"', "null"), ('"blue"', "2")),
    Case("const", {"const": {"a": [1, "x"]}}, ('{"a": [1, "x"]}',), ('{"a": [1]}',)),
    Case(
        "integer range",
        {"type": "integer", "minimum": -3, "maximum": 250},
        ("-3", "99", "250"),
        ("-4", "251"),
    ),
    Case(
        "exclusive range",
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        ("0.5",),
        ("1.5", "-0.1"),
    ),
    Case("multiple", {"type": "integer", "multipleOf": 5}, ("10",), ("12",)),
    Case("pattern", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ('"AB-12"',), ('"A-1"',)),
    Case("unanchored pattern", {"type": "string", "pattern": "b+c"}, ('"abbcd"',), ('"ac"',)),
    Case(
        "date-time",
        {"type": "string", "format": "date-time"},
        ('"2026-01-02T03:04:05Z"',),
        ('"2026"',),
    ),
    Case(
        "uuid",
        {"type": "string", "format": "uuid"},
        ('"123e4567-e89b-12d3-a456-426614174000"',),
        ('"1"',),
    ),
    Case("email", {"type": "string", "format": "email"}, ('"a.b@c.org"',), ('"a"',)),
    Case("any", True, ('{"a": [1, null]}', '"x"'), ("{a}",)),
    Case("any object", {"type": "object"}, ('{"a": {"b": []}}', "{}"), ("[]",)),
    Case(
        "array lengths",
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        ("[1]", "[1, 2, 3]"),
        ("[]", "[1, 2, 3, 4]"),
    ),
    Case(
        "prefix items",
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "items": False,
            "minItems": 2,
        },
        ('[1, "a"]',),
        ('["a", 1]', '[1, "a", 2]'),
    ),
    Case(
        "person",
        _PERSON,
        ('{"name": "Ada", "age": 36, "email": "a@b.org", "tags": ["x"]}',),
        ('{"name": "Ada"}', '{"name": "Ada", "age": 151}'),
    ),
    Case(
        "weather",
        _WEATHER,
        ('{"location": "Oslo, Norway", "unit": "celsius", "days": [1, 2]}',),
        ('{"location": "Oslo", "unit": "kelvin", "days": [1]}',),
    ),
    Case(
        "additional of a type",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ('{"a": 1, "b": 2}',),
        ('{"a": "x"}',),
    ),
    Case(
        "open object",
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ('{"a": 1, "z": "y"}',),
        ('{"a": "x"}',),
    ),
    Case(
        "pattern properties",
        {
            "type": "object",
            "patternProperties": {"^n_": {"type": "integer"}},
            "additionalProperties": False,
        },
        ('{"n_a": 1}',),
        ('{"a": 1}', '{"n_a": "x"}'),
    ),
    Case(
        "property count",
        {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "minProperties": 1,
            "maxProperties": 2,
        },
        ('{"a": 1}',),
        ("{}", '{"a": 1, "b": 2, "c": 3}'),
    ),
    Case(
        "recursion",
        _TREE,
        ('{"value": 1, "children": [{"value": 2, "children": []}]}',),
        ('{"value": 1, "children": [3]}',),
    ),
    Case(
        "anyOf",
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        ('"a"', '["a"]'),
        ("1", "[1]"),
    ),
    Case(
        "oneOf by const",
        _SHAPES,
        ('{"kind": "square", "side": 2}',),
        ('{"kind": "square", "radius": 2}',),
    ),
    Case(
        "oneOf that overlaps",
        {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
        ("4",),
        ("6",),
    ),
    Case(
        "allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ("4",), ("2", "6")
    ),
    Case(
        "allOf of objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        ('{"a": 1, "b": "x"}',),
        ('{"a": 1}',),
    ),
    Case("not", {"type": "string", "not": {"const": "a"}}, ('"b"',), ('"a"',)),
    Case(
        "unique items",
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
        ("[1, 2]",),
        ("[1, 1]",),
    ),
    Case(
        "if then",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "additionalProperties": False,
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
        },
        ('{"a": 1, "b": 2}',),
        ('{"a": 1}',),
    ),
    Case(
        "contains",
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}},
        ("[1, 7]",),
        ("[1]",),
    ),
    Case(
        "dependent required",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "additionalProperties": False,
            "dependentRequired": {"a": ["b"]},
        },
        ('{"a": 1, "b": 2}',),
        ('{"a": 1}',),
    ),
    Case(
        "120 optional fields", _BIG, ('{"field_0": "a", "field_7": null}',), ('{"field_7": "a"}',)
    ),
    Case(
        "200 choices",
        {"enum": [f"choice number {index}" for index in range(200)]},
        ('"choice number 137"',),
        ('"choice number 200"',),
    ),
    Case(
        "nested arrays",
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        },
        ("[[[1, 2.5]]]",),
        ("[[1]]",),
    ),
)
