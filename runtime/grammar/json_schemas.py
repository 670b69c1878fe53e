"""Prepares the JSON schema of a request for llguidance.

llguidance does not enforce some parts of a schema as the standard says: inexact numbers, ECMA-262
patterns, formats, character codes in the names of properties, and keywords beside `$ref` in old
drafts. This module rewrites these parts, or refuses the schema with an error that names the part.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ostinato.runtime.grammar.ecma_patterns import to_rust
from ostinato.runtime.grammar.schema_formats import FORMATS
from ostinato.runtime.grammar.schema_numbers import (
    BOUNDS,
    COUNTS,
    Multiples,
    NotEnforcedError,
    bound,
    check_interval,
    count,
    exact,
    shown,
)

__all__ = ("MAX_OPTIONAL_OF_SOME", "MAX_OPTIONAL_PROPERTIES", "JsonForm", "prepare")

MAX_OPTIONAL_PROPERTIES = 1000  # in one object; the time of a mask grows with their number
# The limit in an object whose minProperties requires some of the optional properties. Then the time
# grows with the square of their number.
MAX_OPTIONAL_OF_SOME = 64

# A space, or a line end and indentation. JSON allows any amount of white space. With any amount, a
# model could write white space until max_tokens.
_WHITE_SPACE = r" |\n[ \t]{0,40}"
_OLD_DRAFTS = ("draft-04", "draft-06", "draft-07")
_KEPT_BESIDE_REF = ("$ref", "$schema", "$defs", "definitions")
_MAPS_OF_SCHEMAS = ("properties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
# Control characters that have no escape of two characters such as \n.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_ESCAPE = re.compile(
    r"\\(?:x[01]|x7[fF]|u00[01]|u007[fF]|c|v|0|u\{0*(?:[01]?[0-9a-fA-F]|7[fF])\})"
)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "number": (int, float),
    "integer": (int, float),
}


class JsonForm(NamedTuple):
    """How the JSON of a constraint is written and checked."""

    strict: bool = True  # False: a keyword that cannot be enforced is ignored
    white_space: str | None = _WHITE_SPACE  # regex of the optional white space; None = none
    closed: bool = False  # objects have only the listed properties


def prepare(schema: object, form: JsonForm) -> dict[str, Any]:
    """The schema for llguidance, with its options in `x-guidance`.

    Raises:
        ValueError: the value is not a schema, or has a keyword that cannot be enforced.
    """
    if schema is False:
        raise ValueError("the schema false allows no answer")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object or a boolean, got {shown(schema)}")  # noqa: TRY004
    options: dict[str, Any] = {"whitespace_flexible": form.white_space is not None}
    if form.white_space is not None:
        options["whitespace_pattern"] = form.white_space
    if not form.strict:
        options |= {"lenient": True, "coerce_one_of": True}
    preparation = _Preparation(schema, form)
    prepared = preparation.schema(schema, "#")
    if preparation.forbids_codes():
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return {**prepared, "x-guidance": options}


class _Preparation:
    """Rewrites the parts of one schema and collects the facts that concern the whole schema."""

    def __init__(self, root: dict[str, Any], form: JsonForm) -> None:
        draft = root.get("$schema")
        self._is_old = isinstance(draft, str) and any(name in draft for name in _OLD_DRAFTS)
        self._form = form
        # Errors that refuse the schema only if the request is strict.
        self._refused = () if form.strict else (NotEnforcedError,)
        self._multiples = Multiples()
        self._has_open_names = False
        self._control = ""  # JSON pointer to the first keyword that has a control character
        self._keywords: dict[str, Callable[[Any, str], Any]] = {
            **dict.fromkeys(_MAPS_OF_SCHEMAS, self._map),
            **dict.fromkeys(_LISTS_OF_SCHEMAS, self._list),
            **dict.fromkeys(_SCHEMAS, self.schema),
            **dict.fromkeys(BOUNDS, bound),
            **dict.fromkeys(COUNTS, count),
            "const": self._value,
            "default": lambda value, place: value,
            "enum": self._enum,
            "examples": lambda value, place: value,
            "items": lambda value, place: (
                self._list(value, place) if isinstance(value, list) else self.schema(value, place)
            ),
            "multipleOf": self._multiples.take,
            "$ref": _text,
            "pattern": self._pattern,
            "patternProperties": lambda value, place: {
                self._pattern(name, place): one for name, one in self._map(value, place).items()
            },
            "required": lambda value, place: [_text(one, place) for one in _list(value, place)],
            "type": _types,
        }

    def forbids_codes(self) -> bool:
        """Whether strings must not contain character codes such as `\\u0066`.

        llguidance compares the names of properties as they are written. So a listed name that is
        written with codes would count as another property.

        Raises:
            ValueError: codes are forbidden, and the schema has a character that needs one.
        """
        if self._has_open_names and self._control:
            raise ValueError(
                f"{self._control} has a control character, which cannot be enforced while an "
                "object of the schema is open for other properties; set its additionalProperties "
                "to false"
            )
        return self._has_open_names

    def schema(self, schema: Any, place: str) -> Any:
        """Rewrite a schema.

        Args:
            schema: the schema.
            place: JSON pointer to it in the whole schema.

        Raises:
            ValueError: the value of a keyword is wrong, or cannot be enforced.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(  # noqa: TRY004
                f"{place} must be a schema, which is an object or a boolean; got {shown(schema)}"
            )
        if self._is_old and "$ref" in schema:  # these drafts ignore other keywords beside it
            schema = {key: schema[key] for key in _KEPT_BESIDE_REF if key in schema}
        prepared: dict[str, Any] = {}
        for keyword, value in schema.items():
            with contextlib.suppress(*self._refused):
                kept = self._keyword(keyword, value, f"{place}/{keyword}")
                if kept is not None or value is None:
                    prepared[keyword] = kept
        for check in (self._check_names, self._check_fewest, check_interval):
            with contextlib.suppress(*self._refused):
                check(prepared, place)
        _merge_enum(prepared)
        return self._format(prepared, place)

    def _keyword(self, keyword: str, value: Any, place: str) -> Any:
        """Rewrite the value of a keyword; None = the keyword limits nothing."""
        if keyword in self._keywords:
            return self._keywords[keyword](value, place)
        # The keyword is an annotation, but a `$ref` can point into it.
        with contextlib.suppress(ValueError):
            if isinstance(value, list):
                return self._list(value, place)
            if isinstance(value, dict):
                is_schema = any(key in self._keywords for key in value)
                return self.schema(value, place) if is_schema else self._map(value, place)
        return value

    def _map(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{place} must be an object, got {shown(value)}")  # noqa: TRY004
        return {name: self.schema(one, f"{place}/{name}") for name, one in value.items()}

    def _list(self, value: Any, place: str) -> list[Any]:
        schemas = enumerate(_list(value, place))
        return [self.schema(one, f"{place}/{index}") for index, one in schemas]

    def _value(self, value: Any, place: str) -> Any:
        if any(_CONTROL.search(text) for text in _texts(value)):
            self._control = self._control or place
        return exact(value, place)

    def _enum(self, values: Any, place: str) -> Any:
        if not _list(values, place):
            raise ValueError(f"{place} must have at least one value, got none")
        return self._value(values, place)

    def _pattern(self, value: Any, place: str) -> str:
        pattern = _text(value, place)
        if _CONTROL.search(pattern) or _CONTROL_ESCAPE.search(pattern):
            self._control = self._control or place
        return to_rust(pattern)

    def _check_names(self, schema: dict[str, Any], place: str) -> None:
        """Check the number of optional properties; close the object if the request says so."""
        listed, patterns = schema.get("properties") or {}, schema.get("patternProperties")
        if self._form.closed and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        if patterns or (listed and schema.get("additionalProperties") is not False):
            self._has_open_names = True
        required = set(schema.get("required", ()))
        num_optional = len(listed.keys() - required)
        needs_some = len(required) < schema.get("minProperties", 0) != schema.get("maxProperties")
        most = MAX_OPTIONAL_OF_SOME if needs_some else MAX_OPTIONAL_PROPERTIES
        if num_optional > most:
            raise ValueError(
                f"{place}/properties has {num_optional} optional properties, but at most {most} "
                f"are possible{' with minProperties' * needs_some}; put more of them into required"
            )

    def _check_fewest(self, schema: dict[str, Any], place: str) -> None:
        """Refuse a `minProperties` that needs two or more optional properties in an open object.

        A model could write one such property twice. Equal names count once, and a grammar does not
        compare names.
        """
        fewest = schema.get("minProperties", 0)
        is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
        if is_open and fewest > len(set(schema.get("required", ()))) + 1:
            raise NotEnforcedError(
                f"{place}/minProperties can be at most 1 more than the number of required "
                f"properties, got {fewest}; put more properties into required"
            )

    def _format(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Replace `format` by patterns. `format` applies to strings only."""
        name, types = schema.get("format"), schema.get("type", "string")
        if name is None or "string" not in (types if isinstance(types, list) else [types]):
            return schema
        rest = {key: value for key, value in schema.items() if key != "format"}
        if not isinstance(name, str) or name not in FORMATS:
            if self._form.strict:
                raise NotEnforcedError(
                    f"{place}/format must be one of {', '.join(FORMATS)} to be enforced, got "
                    f"{shown(name)}"
                )
            return rest
        patterns = [f"^(?:{pattern})$" for pattern in FORMATS[name]]
        if "pattern" not in rest:
            rest["pattern"] = patterns.pop(0)
        if patterns:
            rest["allOf"] = [*rest.get("allOf", []), *({"pattern": one} for one in patterns)]
        return rest


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} must be a string, got {shown(value)}")  # noqa: TRY004
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{place} must be a list, got {shown(value)}")  # noqa: TRY004
    return value


def _types(value: Any, place: str) -> Any:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        raise ValueError(f"{place} must be one of {', '.join(_TYPES)}, got {shown(value)}")
    return value


def _texts(value: Any) -> Iterator[str]:
    """All strings within a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _merge_enum(schema: dict[str, Any]) -> None:
    """Filter an `enum` by the `type` beside it, and leave `type` out.

    Without this, llguidance would combine every value with the type. Its limit is 50,000
    combinations.
    """
    values, types = schema.get("enum"), schema.get("type")
    if values is None or types is None:
        return
    names = types if isinstance(types, list) else [types]
    fitting = [one for one in values if any(_has_type(one, name) for name in names)]
    if fitting:
        schema["enum"] = fitting
        del schema["type"]


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _TYPES[name]) and (name != "integer" or value == value // 1)
