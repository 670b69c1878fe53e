"""Opens and locks files that no other user can change, for the KV tier on disk.

What a file of the tier says about a KV block is believed, and a wrong block gives wrong text. So a
file or a folder is used only if it belongs to this user and if no other user can write to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

__all__ = ("TierBusyError", "TierError", "open_own_file", "require_own_folder", "try_lock")


class TierError(Exception):
    """A slower tier of the KV cache cannot be used. The text is one line and has the remedy."""


class TierBusyError(TierError):
    """Another process uses these files."""


def require_own_folder(path: Path) -> None:
    """Check that a folder belongs to this user, and that no other user can write to it.

    Raises:
        OSError: the path does not exist.
        TierError: it is not a folder, is a link, belongs to another user, or others can write to
            it.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise TierError(f"{path} is not used for KV blocks: it is not a directory; remove it")
    _require_own(path, status)


def open_own_file(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a regular file of this user. A new file has mode 0600. A link is not followed.

    Args:
        path: the file.
        flags: of `os.open`.

    Returns:
        The descriptor. It is closed in programs that this process executes.

    Raises:
        OSError: the file cannot be opened.
        TierError: the file belongs to another user, others can write to it, or it is a link or
            not a regular file.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    more = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | more, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise TierError(f"{path} is not used for KV blocks: it is a link; remove it") from error
    try:
        _require_own_file(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process, unless it is locked already. Does not wait.

    The lock ends when the file is closed. If the process is killed, the lock ends with it. A child
    that was forked meanwhile keeps the lock, unless its parent has released it before.

    Returns:
        Whether the file is locked now.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _require_own_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TierError(f"{path} is not used for KV blocks: it is not a regular file; remove it")
    _require_own(path, status)


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise TierError(
            f"{path} is not used for KV blocks: it belongs to the user with id {status.st_uid}, "
            f"not to {os.geteuid()}; name a directory that this user owns"
        )
    if status.st_mode & 0o022:
        raise TierError(
            f"{path} is not used for KV blocks: others can write to it (mode "
            f"{stat.S_IMODE(status.st_mode):o}); chmod go-w {path}"
        )
