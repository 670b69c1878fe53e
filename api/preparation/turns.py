"""Decodes a large JSON object on the event loop, a part of its lists at a time.

A request can have 10,000 prompts with millions of token ids. Decoding them in one call would take
0.1 s, in which no other request is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

__all__ = ("decoder_in_turns",)

T = TypeVar("T", bound=msgspec.Struct)
_TURN_BYTES = 64 << 10  # bytes decoded (in 1 ms) before other tasks run


def decoder_in_turns(kind: type[T]) -> Callable[[memoryview], Awaitable[T]]:
    """Make a function that decodes the JSON of a struct.

    Between parts of the struct's lists, the function lets other tasks of the event loop run.

    Args:
        kind: the struct's type.
    """
    hints = get_type_hints(kind)
    items = {
        name: msgspec.json.Decoder(get_args(hints[name])[0])
        for name in kind.__struct_fields__
        if get_origin(hints[name]) is list
    }
    lists = [(name, list[msgspec.Raw], msgspec.field(default_factory=list)) for name in items]
    shell = msgspec.defstruct("Shell", lists, bases=(kind,), kw_only=True)
    decode = msgspec.json.Decoder(shell).decode

    async def run(view: memoryview) -> T:
        whole: Any = decode(view)
        values = {name: getattr(whole, name) for name in kind.__struct_fields__}
        for name, decoder in items.items():
            values[name] = await _decoded(decoder, values[name])
        return kind(**values)

    return run


async def _decoded(decoder: msgspec.json.Decoder[Any], raws: list[msgspec.Raw]) -> list[Any]:
    decoded, size = [], 0
    for raw in raws:
        decoded.append(decoder.decode(raw))
        size += memoryview(raw).nbytes
        if size > _TURN_BYTES:
            size = 0
            await asyncio.sleep(0)
    return decoded
