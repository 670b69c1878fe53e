"""Raises the limit of open files, and computes how many connections it allows.

Every connection is an open file. A process at its limit could not start an engine again, so some
files are reserved.
"""

from __future__ import annotations

import contextlib
import resource

from ostinato.runtime.errors import StartupError

__all__ = ("RESERVED_FILES", "raise_file_limit", "reserve_files")

# A server without a connection has about 30 open files. The rest of the reserve is for an engine
# process that is started again, for grammar and template processes, and for files that are read.
RESERVED_FILES = 64
_LEAST_CONNECTIONS = 32
_MOST_FILES = 1 << 16  # a higher limit slows programs that loop over all possible descriptors


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit, but at most to 65,536.

    Returns the new limit; no limit counts as 65,536.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def reserve_files() -> int:
    """Raise the limit; returns how many connections a server may have open at once.

    Raises:
        StartupError: the limit is too low for a server.
    """
    limit, least = raise_file_limit(), RESERVED_FILES + _LEAST_CONNECTIONS
    if limit < least:
        raise StartupError(
            f"the limit of open files is {limit}, and a server needs at least {least}: raise it "
            f"with ulimit -n 1024, LimitNOFILE= of systemd, or --ulimit nofile=1024 of a container"
        )
    return limit - RESERVED_FILES
