"""Makes the cache directory and the directory for an engine's sockets.

The API process makes both before it starts the engine process, so this module imports no torch.
"""

from __future__ import annotations

import logging
import os

from ostinato.conf.environment import TemporaryDirectory, prepare_cache
from ostinato.runtime.errors import StartupError

__all__ = ("ensure_cache", "make_socket_directory")

_LOG = logging.getLogger(__name__)
_REMEDY = "mount a tmpfs at /tmp, or set TMPDIR to a directory that can be written"
_LONGEST_SOCKET_DIRECTORY = 80  # bytes; a socket's path has at most 107 on Linux and 103 on macOS


def ensure_cache() -> bool:
    """Make the cache directory, or replace it by a temporary one when it cannot be written.

    The replacement is logged as a warning.

    Returns:
        Whether this call replaced it.

    Raises:
        StartupError: no temporary directory can be made either.
    """
    try:
        line = prepare_cache()
    except OSError as error:
        raise StartupError(
            f"neither the cache directory nor one for temporary files can be written: {error}; "
            f"{_REMEDY}"
        ) from error
    if line is not None:
        _LOG.warning(line)
    return line is not None


def make_socket_directory() -> TemporaryDirectory:
    """A new temporary directory for the sockets of engine processes.

    Raises:
        StartupError: the directory cannot be made, or its path is too long for a socket.
    """
    try:
        directory = TemporaryDirectory()
    except OSError as error:
        raise StartupError(
            f"no directory for temporary files can be written: {error}; {_REMEDY}"
        ) from error
    if len(os.fsencode(directory.path)) > _LONGEST_SOCKET_DIRECTORY:
        directory.remove()
        raise StartupError(
            f"the directory for temporary files {directory.path.parent} has a path that is too "
            f"long for a socket; set TMPDIR to a path of at most {_LONGEST_SOCKET_DIRECTORY - 22} "
            "bytes"
        )
    return directory
