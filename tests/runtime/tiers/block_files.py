"""Blocks with known contents in a `BlockFile`, for the tests of this folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ostinato.runtime.tiers.block_file import BlockFile

BLOCK_BYTES = 5000
STRIDE = 8192  # bytes of a place in blocks.kv
HEADER_BYTES = 4096  # of index.kv
ENTRY_BYTES = 64


def hash_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def block_of(number: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    return hashlib.shake_256(b"%d" % number).digest(block_bytes)


def opened(
    directory: Path, num_places: int = 4, block_bytes: int = BLOCK_BYTES, identity: str = ""
) -> BlockFile:
    return BlockFile(directory, block_bytes=block_bytes, num_places=num_places, identity=identity)


def saved(directory: Path, numbers: Iterable[int]) -> None:
    """Write each block to the next place, and close the files."""
    file = opened(directory)
    for place, number in enumerate(numbers):
        file.write(place, hash_of(number), [block_of(number)])
    file.close()


def read(file: BlockFile, place: int, number: int) -> bytes | None:
    """What the file gives for a block; None = a miss."""
    data = bytearray(BLOCK_BYTES)
    return bytes(data) if file.read(place, hash_of(number), [memoryview(data)]) else None


def read_in(directory: Path, place: int, number: int) -> bytes | None:
    file = opened(directory)
    try:
        return read(file, place, number)
    finally:
        file.close()


def entries_in(directory: Path, **changes: object) -> list[tuple[int, bytes]]:
    file = opened(directory, **changes)  # pyright: ignore[reportArgumentType]
    try:
        return file.entries()
    finally:
        file.close()
