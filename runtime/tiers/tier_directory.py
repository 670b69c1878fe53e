"""The directory of the KV tier on disk: one folder for each model, engine and rank.

    <root>/LOCK                                          held while an engine chooses its folder
    <root>/weights.digests                               digests of weight files (weights_digest.py)
    <root>/<digest of identity>/identity.json            what the contents of blocks depend on
    <root>/<digest of identity>/engine-<n>/LOCK          held while an engine uses the folder
    <root>/<digest of identity>/engine-<n>/rank-<r>/     the files of one rank (block_file.py)

An engine takes the first folder of its identity that no running engine has. So replicas, and
servers with the same model, have folders of their own, and find them again after a restart. If a
process is killed, its locks end with it.

When an engine opens its folder, folders of other identities are removed, the least recently used
first, until all of them together have at most `quota_bytes`. Those of running engines stay. So the
root has at most `quota_bytes` for each engine of the present identity, and as much for all others
that do not run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock

from ostinato.conf.environment import expand_user
from ostinato.runtime.tiers.own_files import TierError, open_own_file, require_own_folder, try_lock

__all__ = ("TierDirectory", "make_root", "open_directory", "rank_folder")

_LOG = logging.getLogger(__name__)
_LOCK = "LOCK"
_IDENTITY = "identity.json"
_DIGEST = re.compile(r"[0-9a-f]{16}")
_LONGEST_TURN_S = 60.0  # an engine that opens its folder may remove many gigabytes of others
_BLOCK_BYTES = 512  # the unit of st_blocks


class TierDirectory:
    """The folder of one engine, which no other engine uses until `close`.

    Args:
        path: the folder.
        lock: descriptor of its locked file; this object closes it.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def close(self) -> None:
        """Let other engines use the folder; safe to call twice."""
        if self._lock >= 0:
            _unlock([self._lock])
        self._lock = -1


def make_root(root: str) -> Path:
    """Make the directory of all engines with mode 0700, or check the one that is there.

    Args:
        root: the directory; `~` is the home directory. A link is as good as its target.

    Returns:
        Its absolute path, without links.

    Raises:
        TierError: it cannot be made, belongs to another user, or others can write to it.
    """
    top = expand_user(root).absolute()
    try:
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        top = top.resolve()
        require_own_folder(top)
    except OSError as error:
        raise _not_usable(top, error) from error
    if not os.access(top, os.W_OK):
        raise _not_usable(top, OSError(errno.EACCES, os.strerror(errno.EACCES)))
    return top


def open_directory(root: str, identity: Mapping[str, str], quota_bytes: int) -> TierDirectory:
    """Take a folder for an engine, and remove folders of other identities that are too much.

    While another engine opens its folder in the same root, this call waits up to a minute.

    Args:
        root: the directory of all engines; see `make_root`.
        identity: everything that the contents of blocks depend on besides their hashes.
        quota_bytes: bytes on disk that folders of other identities may keep. The caller limits its
            own files.

    Raises:
        TierError: the root or a folder in it cannot be used: it cannot be written, belongs to
            another user, or others can write to it.
    """
    top = make_root(root)
    try:
        with FileLock(top / _LOCK, timeout=_LONGEST_TURN_S, mode=0o600):
            folder = _open_identity(top, identity)
            _make_room(top, folder, quota_bytes)
            return _take_engine(folder)
    except (OSError, NotImplementedError) as error:
        raise _not_usable(top, error) from error


def rank_folder(engine_folder: Path, rank: int) -> Path:
    """The folder of a rank. It is made if it is missing.

    Args:
        engine_folder: the path of a `TierDirectory`.
        rank: the number of the rank.

    Raises:
        TierError: the folder cannot be made, belongs to another user, or others can write to it.
    """
    folder = engine_folder / f"rank-{rank}"
    try:
        _make_folder(folder)
    except OSError as error:
        raise _not_usable(folder, error) from error
    return folder


def _not_usable(path: Path, error: Exception) -> TierError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return TierError(
        f"the directory {path} cannot be used for KV blocks: {reason}; name a directory on a local "
        "disk that can be written"
    )


def _make_folder(path: Path) -> None:
    """Make a folder that only this user can open, or check the one that is there."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    require_own_folder(path)


def _open_identity(top: Path, identity: Mapping[str, str]) -> Path:
    """The folder of an identity. One with another or a damaged identity.json is begun anew."""
    text = json.dumps(dict(identity), sort_keys=True, indent=1).encode()
    folder = top / hashlib.sha256(text).hexdigest()[:16]
    _make_folder(folder)
    if _read(folder / _IDENTITY) == text:
        return folder
    if not _remove(folder):
        raise TierError(
            f"{folder} is in use, and its {_IDENTITY} is damaged or another model's; stop the "
            "other engine, or name another directory"
        )
    _make_folder(folder)
    descriptor = open_own_file(folder / _IDENTITY)
    with open(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    return folder


def _read(file: Path) -> bytes | None:
    try:
        descriptor = open_own_file(file, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as opened:
        return opened.read()


def _take_engine(folder: Path) -> TierDirectory:
    """Lock the first folder that no running engine has. The root is locked."""
    for number in itertools.count():
        path = folder / f"engine-{number}"
        _make_folder(path)
        lock = open_own_file(path / _LOCK)
        try:
            if try_lock(lock):
                os.utime(lock)  # the time of the last use
                return TierDirectory(path, lock)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    raise AssertionError("there are more numbers than engines")


def _make_room(top: Path, own: Path, quota_bytes: int) -> None:
    """Remove folders of other identities until `quota_bytes` are left. The root is locked."""
    others = [folder for folder in _identities(top) if folder != own]
    sizes = {folder: _bytes_on_disk(folder) for folder in others}
    left = sum(sizes.values())
    for folder in sorted(others, key=_last_use_ns):
        if left <= quota_bytes:
            return
        if _remove(folder):
            left -= sizes[folder]
            _LOG.info(
                "removed the KV blocks of another model or configuration in %s (%d MiB)",
                folder,
                sizes[folder] >> 20,
            )


def _identities(top: Path) -> Iterator[Path]:
    """The folders of identities. Anything else in the root is left alone."""
    for folder in top.iterdir():
        is_folder = folder.is_dir() and not folder.is_symlink()
        if is_folder and _DIGEST.fullmatch(folder.name) and (folder / _IDENTITY).exists():
            yield folder


def _last_use_ns(folder: Path) -> int:
    times = [file.stat().st_mtime_ns for file in folder.glob(f"engine-*/{_LOCK}")]
    return max(times, default=folder.stat().st_mtime_ns)


def _bytes_on_disk(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # an engine may remove a file meanwhile
                total += Path(directory, name).lstat().st_blocks * _BLOCK_BYTES
    return total


def _remove(folder: Path) -> bool:
    """Remove the folder of an identity, unless an engine uses it. The root is locked.

    Returns:
        Whether it is gone.
    """
    locks: list[int] = []
    try:
        for file in folder.glob(f"engine-*/{_LOCK}"):
            locks.append(open_own_file(file, os.O_RDWR))
            if not try_lock(locks[-1]):
                return False
        # The identity goes last. If this process is killed here, the rest is found again.
        for engine in folder.glob("engine-*"):
            shutil.rmtree(engine)
        shutil.rmtree(folder)
    except (OSError, TierError) as error:
        _LOG.warning("the KV blocks in %s cannot be removed: %s", folder, error)
        return False
    finally:
        _unlock(locks)
    return True


def _unlock(locks: list[int]) -> None:
    for lock in locks:
        # A forked child may have the file open, and would keep the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
