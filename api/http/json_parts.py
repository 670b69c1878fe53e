"""Encodes an answer as JSON in parts, each of at most 256 entries of a list.

An answer with many log-probabilities can have hundreds of megabytes. Encoding it in one call would
hold the interpreter's lock (GIL) for a long time, and would need memory for all of it at once. The
number of bytes of a part has no limit, because an entry can have any size.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator

import msgspec

__all__ = ("joined_parts", "json_parts", "json_pieces")

_encode = msgspec.json.Encoder().encode
# Items of a list that are encoded in one call. The call takes a millisecond if each item has 20
# log-probabilities.
_ENTRIES = 256
_PIECE = 64 << 10  # least bytes that are sent in one call, except the last


def json_parts(value: object) -> Iterator[bytes]:
    """The parts of `msgspec.json.encode(value)`, in order.

    A list is encoded in parts, and a struct that holds a list is encoded field by field. Everything
    else is encoded in one call: other values, lists that are entries of a list, and structs with
    `array_like` or `omit_defaults`.
    """
    if isinstance(value, list) and value:
        yield b"["
        is_first = True
        for entries in _runs(value):
            if not is_first:
                yield b","
            is_first = False
            if isinstance(entries, list):
                yield _encode(entries)[1:-1]
            else:
                yield from json_parts(entries)
        yield b"]"
    elif isinstance(value, msgspec.Struct) and _has_list(value):
        yield from _struct_parts(value)
    else:
        yield _encode(value)


def _runs(values: list[object]) -> Iterator[object]:
    """Split a list into runs.

    Each run is either a list of entries to encode in one call, or one struct to encode in parts.
    """
    run: list[object] = []
    for value in values:
        is_apart = isinstance(value, msgspec.Struct) and _has_list(value)
        if run and (is_apart or len(run) == _ENTRIES):
            yield run
            run = []
        if is_apart:
            yield value
        else:
            run.append(value)
    if run:
        yield run


def _has_list(value: msgspec.Struct) -> bool:
    config = value.__struct_config__
    if config.array_like or config.omit_defaults:
        return False
    fields = (getattr(value, name) for name in value.__struct_fields__)
    return any(
        (isinstance(field, list) and field)
        or (isinstance(field, msgspec.Struct) and _has_list(field))
        for field in fields
    )


def _struct_parts(value: msgspec.Struct) -> Iterator[bytes]:
    separator, config = b"{", value.__struct_config__
    if config.tag_field is not None:
        yield b"{" + _encode(config.tag_field) + b":" + _encode(config.tag)
        separator = b","
    for name, encoded in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
        field = getattr(value, name)
        if field is not msgspec.UNSET:
            yield separator + _encode(encoded) + b":"
            yield from json_parts(field)
            separator = b","
    yield b"}" if separator == b"," else b"{}"


async def json_pieces(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Join parts to pieces. Other tasks run between the pieces.

    Each piece has more than 64 KiB, except the last one.
    """
    piece: list[bytes] = []
    size = 0
    for part in parts:
        if size > _PIECE:
            yield b"".join(piece)
            piece, size = [], 0
            await asyncio.sleep(0)
        piece.append(part)
        size += len(part)
    yield b"".join(piece)


async def joined_parts(parts: Iterable[bytes], most: int) -> bytes | None:
    """The joined parts; None = they have more than `most` bytes, and the rest was not encoded."""
    pieces: list[bytes] = []
    size = 0
    async for piece in json_pieces(parts):
        pieces.append(piece)
        if (size := size + len(piece)) > most:
            return None
    return b"".join(pieces)
