"""Descriptions of all configuration keys (type, default, range, meaning), read from the schema.

`--help` and error messages use them, so they always agree with the checks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, cast, get_args, get_origin, get_type_hints

from ostinato.conf.root import RunConfig
from ostinato.conf.schema import Section, allowed_range

__all__ = ("KeyDescription", "describe_keys", "describe_sections", "nearest")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDescription:
    """The description of one key."""

    key: str  # dotted, e.g. cache.block_size
    default: str  # as typed on a command line
    allowed: str  # type and range in words, e.g. "an integer in [1, 4096]"
    choices: tuple[str, ...]  # the only legal values, when they can be listed
    meaning: str
    nullable: bool
    free_form: bool  # a mapping whose keys the schema does not name


_TYPE_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping such as {key: value}",
}
_LIST_WORDS = {
    int: "a list of integers such as [1,2]",
    float: "a list of numbers such as [0.5,2]",
    str: "a list of words such as [a,b]",
}


def _choices(hint: Any, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return tuple(hint)
    if hint is bool:
        return ("true", "false")
    return tuple(map(str, metadata.get("one_of", ()))) if get_origin(hint) is None else ()


def _allowed(hint: Any, metadata: Mapping[str, Any]) -> str:
    kind = next((arg for arg in get_args(hint) if arg is not NoneType), hint)
    if get_origin(hint) is list:
        words = _LIST_WORDS[get_args(hint)[0]]
    elif get_origin(hint) is dict:
        return _TYPE_WORDS[dict]
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        return "one of " + ", ".join(kind)
    else:
        words = _TYPE_WORDS[kind]
    limits = allowed_range(metadata)
    if limits.startswith("one of") and get_origin(hint) is not list:
        return limits
    if get_origin(hint) is list and limits:
        return f"{words}, each {limits}"
    separator = ", " if limits.startswith("at ") else " "
    return f"{words}{separator}{limits}" if limits else words


def _typed(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, cast(list[object], value)))}]"
    if value == "":
        return "''"
    return str(value)


def describe_sections() -> dict[str, tuple[type[Section], list[KeyDescription]]]:
    """section name -> (its dataclass, its keys in order of declaration)."""
    sections: dict[str, tuple[type[Section], list[KeyDescription]]] = {}
    for name, section in get_type_hints(RunConfig).items():
        hints = get_type_hints(section)
        keys = [
            KeyDescription(
                key=f"{name}.{setting}",
                default=_typed(default),
                allowed=_allowed(hints[setting], metadata),
                choices=_choices(hints[setting], metadata),
                meaning=metadata.get("meaning", ""),
                nullable=NoneType in get_args(hints[setting]),
                free_form=get_origin(hints[setting]) is dict,
            )
            for setting, (default, metadata) in section.settings().items()
        ]
        sections[name] = (section, keys)
    if set(sections) != {entry.name for entry in fields(RunConfig)}:
        raise AssertionError("every field of RunConfig is a section")
    return sections


@cache
def describe_keys() -> Mapping[str, KeyDescription]:
    """dotted key -> its description, over all sections; read-only."""
    entries = (entry for _, keys in describe_sections().values() for entry in keys)
    return MappingProxyType({entry.key: entry for entry in entries})


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, or None.

    A dotted key is also found by its last part alone: block_size -> cache.block_size.
    """
    choices = list(known)
    if close := difflib.get_close_matches(word, choices, n=1, cutoff=0.6):
        return close[0]
    last_parts = {choice.rpartition(".")[2]: choice for choice in reversed(choices)}
    if close := difflib.get_close_matches(
        word.rpartition(".")[2], list(last_parts), n=1, cutoff=0.75
    ):
        return last_parts[close[0]]
    return None
