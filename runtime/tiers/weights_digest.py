"""A digest of a model's weight files, which the identity of KV blocks on disk has.

Reading all weights takes seconds to minutes. So the digest of each file is kept in a cache file,
with the size, the time of modification and the inode that the file had. The cache file has a digest
of its own in the first line, and JSON after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ostinato.runtime.tiers.own_files import TierError, open_own_file

__all__ = ("FileState", "cached_digest", "states_of", "weights_digest")

_LOG = logging.getLogger(__name__)
# A file that is changed twice within the resolution of its time looks unchanged. File systems have
# resolutions of up to 2 s.
_SETTLED_NS = 2_000_000_000


class FileState(NamedTuple):
    """What differs when a file has been changed or replaced."""

    num_bytes: int
    mtime_ns: int
    inode: int
    device: int


class _Known(msgspec.Struct, frozen=True):
    """The digest that a file had in this state."""

    state: FileState
    sha256: str


def states_of(files: Sequence[Path]) -> list[FileState]:
    """The states of files. If they are the same later, the contents are, too.

    Raises:
        OSError: a file does not exist.
    """
    return [_state(file.stat()) for file in files]


def weights_digest(files: Sequence[Path], cache_file: Path) -> str:
    """SHA-256, in hexadecimal, of the names and contents of all weight files, in any order.

    Files that are not in the cache are read, which releases the GIL. Then their digests are added
    to the cache, except for files that were modified in the last two seconds.

    Args:
        files: a link stands for its target under the name of the link.
        cache_file: made, with mode 0600, if it is missing. If it is damaged or if another user can
            write to it, it is ignored and replaced. If it cannot be written, this is logged.

    Raises:
        OSError: a file of weights cannot be read.
    """
    cache = _read_cache(cache_file)
    digests: list[tuple[str, str]] = []
    added: dict[str, _Known] = {}
    for file in files:
        key = str(file.resolve())
        known = cache.get(key)
        if known is None or known.state != _state(file.stat()):
            known, is_lasting = _digest_file(file)
            if is_lasting:
                added[key] = known
        digests.append((file.name, known.sha256))
    if added:
        there = {key: known for key, known in cache.items() if os.path.exists(key)}
        _write_cache(cache_file, there | added)
    return _combine(digests)


def cached_digest(files: Sequence[Path], cache_file: Path) -> str | None:
    """What `weights_digest` returns, if the cache has all files; else None. Reads no weights."""
    cache = _read_cache(cache_file)
    digests: list[tuple[str, str]] = []
    for file in files:
        try:
            known = cache.get(str(file.resolve()))
            if known is None or known.state != _state(file.stat()):
                return None
        except OSError:
            return None
        digests.append((file.name, known.sha256))
    return _combine(digests)


def _combine(digests: list[tuple[str, str]]) -> str:
    total = hashlib.sha256()
    for name, digest in sorted(digests):
        total.update(os.fsencode(name) + b"\0" + digest.encode())
    return total.hexdigest()


def _state(status: os.stat_result) -> FileState:
    return FileState(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


def _digest_file(file: Path) -> tuple[_Known, bool]:
    """The digest of a file, and whether it holds as long as the file's state stays the same.

    A file that is changed while it is read has another state afterwards.
    """
    with file.open("rb") as opened:
        before = _state(os.fstat(opened.fileno()))
        is_settled = time.time_ns() - before.mtime_ns > _SETTLED_NS
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return _Known(before, digest), is_settled


def _read_cache(file: Path) -> dict[str, _Known]:
    """The digests by path; empty if there are none, or if they cannot be trusted."""
    try:
        with open(open_own_file(file, os.O_RDONLY), "rb") as opened:
            digest, _, body = opened.read().partition(b"\n")
    except FileNotFoundError:
        return {}
    except (OSError, TierError) as error:
        _LOG.info("the digests of weights in %s are not used: %s", file, error)
        return {}
    if digest.decode(errors="replace") != hashlib.sha256(body).hexdigest():
        _LOG.info("the digests of weights in %s are not used: the file is damaged", file)
        return {}
    try:
        # `json` keeps paths that are not UTF-8, and msgspec checks the types.
        return msgspec.convert(json.loads(body), dict[str, _Known])
    except (ValueError, msgspec.ValidationError) as error:
        _LOG.info("the digests of weights in %s are of another version: %s", file, error)
        return {}


def _write_cache(file: Path, cache: dict[str, _Known]) -> None:
    body = json.dumps(msgspec.to_builtins(cache), indent=1).encode()
    scratch: str | None = None
    try:
        descriptor, scratch = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        with open(descriptor, "wb") as opened:
            opened.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        os.replace(scratch, file)
    except OSError as error:
        _LOG.info("the digests of weights are not kept, %s cannot be written: %s", file, error)
        if scratch is not None:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
