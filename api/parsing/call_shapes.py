"""The ways to write calls (`ToolCallFormat`) that a prompt or a grammar prescribes."""

from __future__ import annotations

from ostinato.api.parsing.bodies.tagged_bodies import TagLayout
from ostinato.runtime.types.structured_outputs import ToolCallFormat

__all__ = ("json_shape", "list_shape", "tag_shape")


def json_shape(key: str = "arguments", end: str = "}", **fields: str) -> ToolCallFormat:
    """Calls as JSON objects with two keys: `name`, and `key` for the arguments."""
    return ToolCallFormat(
        **{"begin": '{"name": "', "middle": f'", "{key}": ', "end": end, "trigger": "", **fields}
    )


def list_shape(opening: str, closing: str = "") -> ToolCallFormat:
    """Calls as one JSON list."""
    return json_shape(
        opening=opening + "[",
        separator=", ",
        closing="]" + closing,
        trigger=opening or '[{"name": "',
    )


def tag_shape(layout: TagLayout, before: str, after: str, **block: str) -> ToolCallFormat:
    """Calls with tags. `before` and `after` are the markers around a call."""
    return ToolCallFormat(
        begin=f"{before}{layout.function_begin}",
        middle=f"{layout.name_end}\n",
        end=f"{layout.function_end}{after}",
        **{"trigger": before, **block},
    )
