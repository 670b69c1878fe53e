"""What a message about a refused body says of a field: its value, and the values it may have."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

__all__ = ("allowed_values", "shown_value")

_PART = re.compile(r"[^.\[\]]+|\[[^\]]*\]")  # of a path such as `tools[0].type`
_type_info = lru_cache(maxsize=64)(inspect.type_info)  # it takes 10 ms for the body of a chat


def allowed_values(schema: Any, path: str) -> list[str]:
    """The values of a field that has some words or tags only, as JSON; [] for other fields.

    Args:
        schema: the type of the body: a struct, or a union of structs.
        path: the field, such as `response_format.type`.
    """
    *parents, last = _PART.findall(path) or [""]
    types = list(_expanded([_type_info(schema)]))
    for part in parents:
        types = list(_expanded(_inside(types, part)))
    found: list[Any] = [
        one.tag for one in types if isinstance(one, inspect.StructType) and one.tag_field == last
    ]
    for one in _expanded(_inside(types, last)):
        if isinstance(one, inspect.LiteralType):
            found += one.values
        elif isinstance(one, inspect.EnumType):
            found += [member.value for member in one.cls]
        elif isinstance(one, inspect.BoolType):
            found += [True, False]
    return list(dict.fromkeys(msgspec.json.encode(value).decode() for value in found))


def _expanded(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """The types without unions and annotations."""
    for one in types:
        if isinstance(one, inspect.UnionType):
            yield from _expanded(one.types)
        elif isinstance(one, inspect.Metadata):
            yield from _expanded([one.type])
        else:
            yield one


def _inside(types: Iterable[inspect.Type], part: str) -> Iterator[inspect.Type]:
    """The types of a field, or of an item if `part` is an index."""
    for one in types:
        if isinstance(one, inspect.StructType):
            yield from (field.type for field in one.fields if field.encode_name == part)
        elif part.startswith("[") and isinstance(one, inspect.CollectionType):
            yield one.item_type
        elif part.startswith("[") and isinstance(one, inspect.DictType):
            yield one.value_type


def shown_value(body: Any, path: str) -> str | None:
    """A field's value in a decoded body, shortened; None if it is not there."""
    for part in _PART.findall(path):
        key: Any = int(part[1:-1]) if re.fullmatch(r"\[\d+\]", part) else part
        try:
            body = body[key]
        except (KeyError, IndexError, TypeError):
            return None
    return reprlib.repr(body)
