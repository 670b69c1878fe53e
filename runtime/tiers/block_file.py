"""The KV blocks of one rank on disk: fixed places in a file, and an index with checksums.

`blocks.kv` has a place of `block_bytes`, rounded up to 4096, for each block. It is sparse and grows
by writing. `index.kv` has a header of 4096 bytes and then one entry of 64 bytes for each place:

| bytes | content |
|---|---|
| 0 - 31 | hash of the block |
| 32 - 39 | stamp: a number that grows with each write; 0 = the place is empty |
| 40 - 43 | CRC-32 of the block's hash and its bytes |
| 44 - 59 | zeros |
| 60 - 63 | CRC-32 of the 60 bytes before |

A block's bytes are written before its entry. Until the new entry is written, the place has the
entry of the block before. The checksum in it does not fit the new bytes. So whatever part of a
write is lost when a process is killed or when power fails, a read finds the right bytes or a miss.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ostinato.runtime.tiers.own_files import (
    TierBusyError,
    TierError,
    open_own_file,
    try_lock,
)

__all__ = ("BlockFile", "place_stride")

_BLOCKS = "blocks.kv"
_INDEX = "index.kv"
_MAGIC = b"ostinato"
_VERSION = 1
_PAGE_BYTES = 4096  # places begin at pages, so that no page has bytes of two blocks
_HASH_BYTES = 32
_HEADER = struct.Struct("<8sQQ32s")  # magic, version, bytes of a block, digest of the identity
_ENTRY = struct.Struct("<32sQI16x")  # hash, stamp, checksum of the block
_CHECKSUM = struct.Struct("<I")
_ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size
_NO_ENTRY = bytes(_ENTRY_BYTES)
_NO_ENTRIES = bytes(_PAGE_BYTES)
_MOST_BUFFERS = 1024  # IOV_MAX: of one call of preadv or pwritev

_sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has only fsync


class _Entry(NamedTuple):
    block_hash: bytes
    stamp: int
    checksum: int


class BlockFile:
    """The blocks of one rank in the files of one directory.

    The caller makes one call at a time, except that `sync` may run beside others. So there are no
    locks. Copies and checksums of large buffers release the GIL.

    If the files are for another format, another `block_bytes` or another `identity`, or if their
    header is damaged, both are emptied. If they have another number of places, the places from
    `num_places` on are removed, or empty places are added.

    Args:
        directory: exists. No two ranks have the same one.
        block_bytes: of each block, 1 or more.
        num_places: blocks that fit, 1 or more.
        identity: what the contents of blocks depend on besides their hashes. Files that were
            written with another identity are not read.

    Attributes:
        num_places: blocks that fit.
        num_errors: reads that failed because of an OSError.

    Raises:
        TierBusyError: another process, or another `BlockFile` of this process, uses the files.
        TierError: a file cannot be opened or written, belongs to another user, can be written by
            others, is a link, or cannot be locked.
    """

    def __init__(
        self, directory: Path, *, block_bytes: int, num_places: int, identity: str = ""
    ) -> None:
        assert block_bytes > 0, "a block has bytes"
        assert num_places > 0, "a file of blocks has places"
        self.num_places = num_places
        self.num_errors = 0
        self._block_bytes = block_bytes
        self._stride = place_stride(block_bytes)
        self._last_stamp: int | None = None  # None until the index has been read
        self._index = self._blocks = -1
        try:
            self._index = open_own_file(directory / _INDEX)
            _lock(self._index, directory)
            self._blocks = open_own_file(directory / _BLOCKS)
            digest = hashlib.sha256(identity.encode()).digest()
            self._prepare(_HEADER.pack(_MAGIC, _VERSION, block_bytes, digest))
        except OSError as error:
            self.close()
            raise TierError(
                f"the files of KV blocks in {directory} cannot be opened: "
                f"{error.strerror or error}; name a directory on a local disk that can be written"
            ) from error
        except BaseException:
            self.close()
            raise

    def entries(self) -> list[tuple[int, bytes]]:
        """(place, hash) of all blocks, the one that was written first at the beginning.

        If two places have blocks with the same hash, the newer block is kept and the other place is
        emptied. The bytes of blocks are not read, so `read` may still find a block damaged.

        Raises:
            OSError: the index cannot be read or written.
        """
        found = self._read_index()
        self._last_stamp = found[-1][1].stamp if found else 0
        places = {entry.block_hash: place for place, entry in found}  # the newest of each hash
        kept: list[tuple[int, bytes]] = []
        for place, entry in found:
            if places[entry.block_hash] == place:
                kept.append((place, entry.block_hash))
            else:
                _write_all(self._index, [_NO_ENTRY], _entry_offset(place))
        return kept

    def write(self, place: int, block_hash: bytes, parts: Sequence[memoryview | bytes]) -> None:
        """Put a block into a place. The block that was there is lost.

        Args:
            place: 0 .. num_places - 1.
            block_hash: 32 bytes. It must determine the block's bytes.
            parts: the block's bytes, in order. They do not change during the call, are contiguous,
                and have `block_bytes` bytes together.

        Raises:
            OSError: the disk is full or broken. The place has the block that was there before, or
                none.
        """
        self._check(place, block_hash, parts)
        if self._last_stamp is None:
            found = self._read_index()
            self._last_stamp = found[-1][1].stamp if found else 0
        _write_all(self._blocks, parts, place * self._stride)
        # A stamp is used once, also if its entry cannot be written.
        self._last_stamp += 1
        entry = _ENTRY.pack(block_hash, self._last_stamp, _checksum(block_hash, parts))
        entry += _CHECKSUM.pack(zlib.crc32(entry))
        _write_all(self._index, [entry], _entry_offset(place))

    def read(self, place: int, block_hash: bytes, parts: Sequence[memoryview]) -> bool:
        """Copy a block out of its place.

        Args:
            place: 0 .. num_places - 1.
            block_hash: of the block that is wanted, 32 bytes.
            parts: writable and contiguous buffers with `block_bytes` bytes together. They are
                filled in order.

        Returns:
            Whether the parts have the block's bytes. False if the place has another block or none,
            if the block is damaged, or if it cannot be read; the parts may have any bytes then.
        """
        self._check(place, block_hash, parts)
        try:
            entry = _parse(os.pread(self._index, _ENTRY_BYTES, _entry_offset(place)))
            if entry is None or entry.block_hash != block_hash:
                return False
            if not _transfer(os.preadv, self._blocks, parts, place * self._stride):
                return False
        except OSError:
            self.num_errors += 1
            return False
        return entry.checksum == _checksum(block_hash, parts)

    def clear(self) -> None:
        """Remove all blocks, and free their bytes on disk.

        They stay removed even if power fails after this call.

        Raises:
            OSError: the files cannot be changed.
        """
        os.ftruncate(self._index, _PAGE_BYTES)
        os.ftruncate(self._index, _entry_offset(self.num_places))
        os.ftruncate(self._blocks, 0)
        os.fsync(self._index)

    def sync(self) -> None:
        """Wait until all blocks are on disk, so that they are still there after a loss of power.

        They survive the end of the process without this call.

        Raises:
            OSError: the disk is full or broken.
        """
        _sync_data(self._blocks)
        _sync_data(self._index)

    def close(self) -> None:
        """Close and unlock the files; safe to call twice.

        After it, `read` finds nothing, and other calls fail.
        """
        if self._index >= 0:
            # A forked child may have the file open, and would keep the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(self._index, fcntl.LOCK_UN)
        for descriptor in (self._blocks, self._index):
            if descriptor >= 0:
                os.close(descriptor)
        self._blocks = self._index = -1

    def _prepare(self, header: bytes) -> None:
        """Make the header and the sizes of both files right. The index is locked."""
        page = header + bytes(_PAGE_BYTES - len(header))
        if os.pread(self._index, _PAGE_BYTES, 0) != page:
            os.ftruncate(self._index, 0)
            os.ftruncate(self._blocks, 0)
            _write_all(self._index, [page], 0)
        os.ftruncate(self._index, _entry_offset(self.num_places))
        most_bytes = self.num_places * self._stride
        if os.fstat(self._blocks).st_size > most_bytes:
            os.ftruncate(self._blocks, most_bytes)

    def _read_index(self) -> list[tuple[int, _Entry]]:
        """(place, entry) of all valid entries, in the order of their stamps."""
        index = bytearray(_ENTRY_BYTES * self.num_places)
        _transfer(os.preadv, self._index, [memoryview(index)], _PAGE_BYTES)
        found: list[tuple[int, _Entry]] = []
        # Most places of a new file are empty. Comparing pages skips them quickly.
        for page in range(0, len(index), _PAGE_BYTES):
            if index[page : page + _PAGE_BYTES] == _NO_ENTRIES:
                continue
            for begin in range(page, min(page + _PAGE_BYTES, len(index)), _ENTRY_BYTES):
                entry = _parse(index[begin : begin + _ENTRY_BYTES])
                if entry is not None:
                    found.append((begin // _ENTRY_BYTES, entry))
        return sorted(found, key=lambda item: item[1].stamp)

    def _check(self, place: int, block_hash: bytes, parts: Sequence[memoryview | bytes]) -> None:
        assert 0 <= place < self.num_places, "the file has the place"
        assert len(block_hash) == _HASH_BYTES, "a hash has 32 bytes"
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        assert num_bytes == self._block_bytes, "the parts are as long as a block"


def place_stride(block_bytes: int) -> int:
    """Bytes of a place on disk: those of a block, rounded up to whole pages."""
    return -(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _lock(index: int, directory: Path) -> None:
    if not try_lock(index):
        raise TierBusyError(
            f"{directory / _INDEX} is in use by another process; wait until it ends, or name "
            "another directory"
        )


def _entry_offset(place: int) -> int:
    return _PAGE_BYTES + _ENTRY_BYTES * place


def _parse(data: bytes | bytearray) -> _Entry | None:
    """The entry in 64 bytes; None if there is none, or if it is damaged or incomplete."""
    if len(data) != _ENTRY_BYTES or data == _NO_ENTRY:
        return None
    entry = _Entry(*_ENTRY.unpack_from(data))
    (checksum,) = _CHECKSUM.unpack_from(data, _ENTRY.size)
    if entry.stamp == 0 or checksum != zlib.crc32(data[: _ENTRY.size]):
        return None
    return entry


def _checksum(block_hash: bytes, parts: Sequence[memoryview | bytes]) -> int:
    """CRC-32 of a block. It begins with the hash, so other blocks' bytes do not fit."""
    checksum = zlib.crc32(block_hash)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _write_all(descriptor: int, parts: Sequence[memoryview | bytes], offset: int) -> None:
    """Write all bytes of the parts from an offset on.

    Raises:
        OSError: not all bytes could be written.
    """
    if not _transfer(os.pwritev, descriptor, parts, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    parts: Sequence[memoryview | bytes],
    offset: int,
) -> bool:
    """Read or write all parts. A call for many bytes may transfer only some, and is continued.

    Args:
        call: `os.preadv` or `os.pwritev`.
        descriptor: of the file.
        parts: contiguous buffers.
        offset: of the first byte in the file.

    Returns:
        False if the file ended before.

    Raises:
        OSError: a call failed.
    """
    views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    first = 0  # of the views that are not done
    while first < len(views):
        done = call(descriptor, views[first : first + _MOST_BUFFERS], offset)
        if done == 0:
            return False
        offset += done
        while first < len(views) and done >= len(views[first]):
            done -= len(views[first])
            first += 1
        if done:
            views[first] = views[first][done:]
    return True
