"""Damaged, torn and misplaced bytes of the two files of blocks: never a wrong block."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.tiers.block_files import (
    BLOCK_BYTES,
    ENTRY_BYTES,
    HEADER_BYTES,
    STRIDE,
    block_of,
    entries_in,
    hash_of,
    opened,
    read_in,
    saved,
)


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(data)


def test_every_damaged_or_missing_byte_of_an_entry_makes_it_invalid(tmp_path: Path) -> None:
    saved(tmp_path, [1, 2])
    index = tmp_path / "index.kv"
    whole = index.read_bytes()
    for position in range(HEADER_BYTES + ENTRY_BYTES, HEADER_BYTES + 2 * ENTRY_BYTES):
        index.write_bytes(whole)
        flip(index, position)
        assert entries_in(tmp_path) == [(0, hash_of(1))]
        assert read_in(tmp_path, 1, 2) is None
        index.write_bytes(whole[:position])
        assert entries_in(tmp_path) == [(0, hash_of(1))]
        assert read_in(tmp_path, 0, 1) == block_of(1)


def test_every_mixture_of_an_old_and_a_new_entry_is_a_miss(tmp_path: Path) -> None:
    saved(tmp_path, [1])
    index = tmp_path / "index.kv"
    old = index.read_bytes()
    file = opened(tmp_path)
    file.write(0, hash_of(2), [block_of(2)])
    file.close()
    new = index.read_bytes()
    for cut in range(HEADER_BYTES, HEADER_BYTES + ENTRY_BYTES):
        for mixture in (new[:cut] + old[cut:], old[:cut] + new[cut:]):
            index.write_bytes(mixture)
            assert read_in(tmp_path, 0, 1) is None
            found = read_in(tmp_path, 0, 2)
            assert found == (block_of(2) if mixture == new else None)


def test_a_damaged_header_begins_the_files_anew(tmp_path: Path) -> None:
    saved(tmp_path, [1])
    index, blocks = tmp_path / "index.kv", tmp_path / "blocks.kv"
    whole = index.read_bytes(), blocks.read_bytes()
    for position in [*range(64), 1000, 4095]:
        index.write_bytes(whole[0])
        blocks.write_bytes(whole[1])
        flip(index, position)
        assert entries_in(tmp_path) == []
        assert blocks.stat().st_size == 0
        assert len(index.read_bytes()) == len(whole[0])
        index.write_bytes(whole[0][:position])
        assert entries_in(tmp_path) == []


def test_damaged_or_missing_bytes_of_a_block_are_a_miss(tmp_path: Path) -> None:
    saved(tmp_path, [1, 2])
    blocks = tmp_path / "blocks.kv"
    whole = blocks.read_bytes()
    assert len(whole) == STRIDE + BLOCK_BYTES
    for position in [*range(STRIDE, len(whole), 97), len(whole) - 1]:
        for damaged in (
            whole[:position],
            whole[:position] + bytes(len(whole) - position),
            whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :],
        ):
            blocks.write_bytes(damaged)
            found = read_in(tmp_path, 1, 2)
            assert found == (block_of(2) if damaged == whole else None)
            assert read_in(tmp_path, 0, 1) == block_of(1)


def test_bytes_of_another_block_are_a_miss(tmp_path: Path) -> None:
    """Also if a file system has put the bytes, or an entry, of one block into another's place."""
    saved(tmp_path, [1, 2])
    blocks, index = tmp_path / "blocks.kv", tmp_path / "index.kv"
    whole = blocks.read_bytes(), index.read_bytes()
    blocks.write_bytes(whole[0][STRIDE:].ljust(STRIDE, b"\0") + whole[0][:BLOCK_BYTES])
    assert read_in(tmp_path, 0, 1) is None
    assert read_in(tmp_path, 1, 2) is None
    blocks.write_bytes(whole[0])
    header, entries = whole[1][:HEADER_BYTES], whole[1][HEADER_BYTES:]
    index.write_bytes(header + entries[ENTRY_BYTES : 2 * ENTRY_BYTES] * 2)
    assert read_in(tmp_path, 0, 2) is None
    assert read_in(tmp_path, 1, 2) == block_of(2)
