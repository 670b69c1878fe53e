"""The shapes of calls, as a prompt or a grammar prescribes them."""

from __future__ import annotations

from ostinato.api.parsing.bodies.tagged_bodies import TagLayout
from ostinato.runtime.types.structured_outputs import ToolCallFormat

__all__ = ("json_shape", "list_shape", "tag_shape")


def json_shape(key: str = "arguments", end: str = "}", **fields: str) -> ToolCallFormat:
    """Calls as objects with the keys `name` and `key`."""
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
    """Calls with tags; `before` and `after` are the markers of one call."""
    return ToolCallFormat(
        begin=f"{before}{layout.function_begin}",
        middle=f"{layout.name_end}\n",
        end=f"{layout.function_end}{after}",
        **{"trigger": before, **block},
    )
