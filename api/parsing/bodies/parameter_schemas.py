"""Reads the schema of a function's parameters, for formats that write the parameters one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ostinato.runtime.errors import InvalidRequestError

__all__ = ("Parameter", "allowed_types", "listed", "parameters_of", "types_of_parameters")

_ALL = ("string", "integer", "number", "boolean", "null", "array", "object")
_MAX_DEPTH = 16
# Keywords that constrain nothing.
_NOTES = {"title", "description", "default", "examples", "$comment"}
# Keywords that `strict` accepts at the top of a schema.
_OF_OBJECTS = _NOTES | {
    *("type", "properties", "required", "additionalProperties", "strict"),
    *("$defs", "definitions", "$schema", "$id"),
}
# Keywords that do not limit strings themselves. `$ref`, `anyOf` and `oneOf` lead to further
# schemas, which `_is_free` checks too.
_OF_FREE_TEXT = _NOTES | {"type", "$ref", "anyOf", "oneOf"}
_DEFINITIONS = ("$defs", "definitions")


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a function."""

    name: str
    schema: Any  # includes the definitions of the whole schema, so that references resolve
    types: tuple[str, ...]  # JSON types that the schema allows; empty = any
    is_required: bool
    choices: tuple[str, ...] = ()  # values of its own `enum` or `const`, if all are strings
    is_free: bool = True  # only `types` and `choices` limit the parameter

    @property
    def may_be_text(self) -> bool:
        return not self.types or "string" in self.types


def types_of_parameters(schema: dict[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Parameter -> the JSON types that its schema allows; () = any."""
    root = schema or {}
    properties = root.get("properties")
    given = properties.items() if isinstance(properties, dict) else ()
    return {name: allowed_types(one, root) for name, one in given}


def parameters_of(
    function: str, schema: dict[str, Any] | None, *, strict: bool, limits_text: bool
) -> list[Parameter] | None:
    """The parameters of a function; None = any are allowed.

    A schema that is not empty and has no `properties` allows any parameters, unless its
    `additionalProperties` is false. A missing or empty schema allows none.

    Args:
        function: the function's name.
        schema: the schema of its parameters.
        strict: whether the arguments must match the schema.
        limits_text: the format can enforce keywords for strings, such as `pattern`.

    Raises:
        InvalidRequestError: `strict` is true, and the format cannot enforce the schema.
    """
    root = schema or {"properties": {}}
    unknown = sorted(set(root) - _OF_OBJECTS)
    if strict and unknown:
        _refuse(function, unknown[0])
    properties = root.get("properties")
    if not isinstance(properties, dict):
        return [] if root.get("additionalProperties") is False else None
    required = root.get("required")
    required = required if isinstance(required, list) else []
    missing = [name for name in required if name not in properties]
    if strict and missing:
        _refuse(function, f"the required name {missing[0]!r}, which is not in properties,")
    shared = {key: root[key] for key in _DEFINITIONS if key in root}
    found = [
        _parameter(name, one, root, shared, is_required=name in required)
        for name, one in properties.items()
    ]
    for one in found:
        if strict and one.may_be_text and not (one.is_free or limits_text):
            _refuse(function, f"a limit of the string {one.name!r}")
    return found


def _refuse(function: str, what: str) -> None:
    raise InvalidRequestError(
        f"tools: {what} cannot be enforced in the format in which this model writes calls; remove"
        f" it from the parameters of {function!r}, or leave out strict (of a custom tool: leave out"
        " its format)",
        param="tools",
        code="invalid_value",
    )


def _parameter(
    name: str, schema: Any, root: dict[str, Any], shared: dict[str, Any], *, is_required: bool
) -> Parameter:
    types = allowed_types(schema, root)
    choices: tuple[str, ...] = ()
    limits = schema  # without the keyword that `choices` enforces
    if isinstance(schema, dict):
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if values and all(isinstance(value, str) for value in values):
            choices = tuple(dict.fromkeys(values))
            enforced = "enum" if "enum" in schema else "const"
            limits = {key: value for key, value in schema.items() if key != enforced}
    return Parameter(
        name=name,
        schema={**schema, **shared} if isinstance(schema, dict) else schema,
        types=types,
        is_required=is_required,
        choices=choices,
        is_free=_is_free(limits, root),
    )


def _is_free(schema: Any, root: dict[str, Any]) -> bool:
    """Whether a schema has no keyword that may limit strings.

    The alternatives and the targets of references must not have one either.
    """
    seen: set[str] = set()
    left = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, dict):
            if one is not True:
                return False
            continue
        if not set(one) <= _OF_FREE_TEXT:
            return False
        for key in ("anyOf", "oneOf"):
            several = one.get(key, [])
            left += several if isinstance(several, list) else [None]
        reference = one.get("$ref", "")
        if not isinstance(reference, str):
            return False
        if reference and reference not in seen:
            seen.add(reference)
            left.append(_target(reference, root))
    return True


def allowed_types(schema: Any, root: dict[str, Any]) -> tuple[str, ...]:
    """The JSON types that a schema allows; () = any."""
    found: set[str] = set()
    for one in _branches(schema, root, set()):
        kind = one.get("type") if isinstance(one, dict) else None
        if isinstance(one, dict) and kind is None:
            values = one.get("enum", [one["const"]] if "const" in one else None)
            if isinstance(values, list):
                kind = [_type_of(value) for value in values]
        if kind is None:
            return ()
        found |= {str(item) for item in kind} if isinstance(kind, list) else {str(kind)}
    return tuple(name for name in _ALL if name in found)


def _branches(schema: Any, root: dict[str, Any], seen: set[str], depth: int = 0) -> Iterator[Any]:
    """The alternatives of a schema: those of `anyOf` and `oneOf`, with references resolved.

    Args:
        schema: the schema.
        root: the schema with the definitions.
        seen: references that are not resolved again. Without it, references to references to
            the same schema could take exponential time.
        depth: number of references and alternatives that led to `schema`.
    """
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        yield True
        return
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in seen:
            seen.add(reference)
            yield from _branches(_target(reference, root), root, seen, depth + 1)
        return
    several = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(several, list) or "type" in schema:
        yield schema
        return
    for one in several:
        yield from _branches(one, root, seen, depth + 1)


def _target(reference: str, root: dict[str, Any]) -> Any:
    value: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if reference.startswith("#/") else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def listed(
    parameters: list[Parameter],
    argument: Callable[[Parameter, str], dict[str, Any]],
    separator: str,
) -> dict[str, Any]:
    """The xgrammar format of arguments with separators. Optional arguments can be missing.

    Args:
        parameters: the parameters. In the text, the required ones come first.
        argument: makes the format of an argument from its parameter and the text before it.
        separator: the text between two arguments.
    """
    required = [one for one in parameters if one.is_required]
    others = [one for one in parameters if not one.is_required]
    nothing = {"type": "const_string", "value": ""}

    def sequence(first: Parameter, following: list[Parameter]) -> dict[str, Any]:
        elements = [argument(first, "")]
        for one in following:
            tree = argument(one, separator)
            elements.append(
                tree if one.is_required else {"type": "or", "elements": [tree, nothing]}
            )
        return {"type": "sequence", "elements": elements}

    if required:
        return sequence(required[0], required[1:] + others)
    ways = [sequence(one, others[at + 1 :]) for at, one in enumerate(others)]
    return {"type": "or", "elements": [*ways, nothing]} if ways else nothing
