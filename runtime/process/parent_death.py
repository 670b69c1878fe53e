"""Ends a process when its parent process ends for any reason."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from pathlib import Path

from ostinato.runtime.engine.flight_recorder import flight_path

__all__ = ("end_with_parent", "end_with_standard_input", "remove_files")

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when the thread that started it ends. Linux only.

    Args:
        parent: id of the process that started this one; 0 = leave this process as it is.
    """
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def end_with_standard_input(address: str) -> None:
    """End this process when standard input closes, that is, when the client's process ends.

    Args:
        address: as for `remove_files`.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        remove_files(address)
        os._exit(0)

    threading.Thread(target=watch, name="watch-client", daemon=True).start()


def remove_files(address: str) -> None:
    """Remove what a killed client leaves behind: the socket, the recorder's file, the directory.

    The last engine of a client with several replicas finds the directory empty and removes it.

    Args:
        address: the address of the client's ZeroMQ socket, `ipc://PATH`.
    """
    socket = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        socket.unlink(missing_ok=True)
        flight_path(socket).unlink(missing_ok=True)
        socket.parent.rmdir()
