"""The processes of the ranks after the first, as their parent or rank 0's process sees them.

`LocalRank` is a child of this process: of rank 0's process, or on another machine of
rank_host_main.py. Rank 0's process uses a `RemoteRank` for a rank on another machine. The bridge of
rank 0's machine passes its messages on and reports its state (runtime/process/bridge_main.py).

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from typing import NamedTuple

from ostinato.graphs.compile_monitor import LateCompile
from ostinato.runtime.ranks.messages import (
    Answer,
    Arrived,
    Frames,
    LateCompiles,
    RankEnded,
    RankFailed,
    RankMessage,
    RankSeen,
    RankStack,
    rank_decoder,
)
from ostinato.runtime.ranks.rank_activity import Activity, read_activity

__all__ = ("RANK_MODULE", "LocalRank", "RankLog", "RemoteRank")

RANK_MODULE = "ostinato.runtime.process.rank_main"
_MAX_STACK_BYTES = 1 << 16


class RankLog(NamedTuple):
    """The log settings of the ranks."""

    level: str = "warning"
    log_format: str = "text"  # text | json
    prefix: str = ""  # comes before `rank 1` in the name of the process


class _Rank:
    """What is known of a rank, and the socket to it."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.socket = connection
        self.inbox: deque[Arrived | Answer] = deque()
        self.late_compiles: list[LateCompile] = []
        self.error: RankFailed | None = None
        self._frames = Frames()

    def take(self, data: bytes) -> None:
        """Take in bytes that have come through the socket."""
        for frame in self._frames.add(data):
            self._handle(rank_decoder.decode(frame))

    def _handle(self, message: RankMessage) -> None:
        if isinstance(message, LateCompiles):
            self.late_compiles = message.compiles
        elif isinstance(message, RankFailed):
            self.error = message
        elif isinstance(message, Arrived | Answer):
            self.inbox.append(message)


class LocalRank(_Rank):
    """A rank's process on this machine."""

    def __init__(self, number: int, log: RankLog) -> None:
        """Start the process.

        Raises:
            OSError: the system cannot start another process.
        """
        ours, theirs = socket.socketpair()
        super().__init__(number, ours)
        self._stack_fd = os.memfd_create(f"stack-of-rank-{number}")
        # The system kills a child when the thread that started it ends.
        is_main = threading.current_thread() is threading.main_thread()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", RANK_MODULE),
                        *(str(theirs.fileno()), str(self._stack_fd)),
                        *(str(os.getpid() if is_main else 0), log.level, log.log_format),
                        f"{log.prefix}rank {number}",
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self._stack_fd),
                )
        except OSError:
            self.release()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stack(self) -> str:
        """The stacks of threads that the process wrote on a request or when it crashed."""
        data = os.pread(self._stack_fd, _MAX_STACK_BYTES, 0)
        return data.decode(errors="replace").strip()

    @property
    def activity(self) -> Activity | None:
        """The state of the process; None if it has ended."""
        return read_activity(self.pid)

    def request_stack(self) -> None:
        """Let the process write its stacks, even if it is stopped."""
        self.process.send_signal(signal.SIGUSR1)
        self.process.send_signal(signal.SIGCONT)  # a stopped process handles no signal

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout_s: float) -> int:
        """Wait until the process ends; kill it after `timeout_s`. Returns its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def end(self, timeout_s: float) -> tuple[str, str]:
        """Like `wait`; returns why the process ended (killed, crash or exit), and a text."""
        return _explain_end(self.pid, self.wait(timeout_s))

    def release(self) -> None:
        """Close the descriptors."""
        self.socket.close()
        os.close(self._stack_fd)


class RemoteRank(_Rank):
    """A rank's process on another machine.

    Args:
        number: the number of the rank.
        connection: to the bridge of this machine.
    """

    def __init__(self, number: int, connection: socket.socket) -> None:
        super().__init__(number, connection)
        self.activity: Activity | None = None
        self.stack = ""
        self._ended: RankEnded | None = None

    def _handle(self, message: RankMessage) -> None:
        if isinstance(message, RankSeen):
            self.activity = Activity(message.is_stopped, message.has_work, message.cpu_s)
        elif isinstance(message, RankStack):
            self.stack = message.text
        elif isinstance(message, RankEnded):
            self._ended, self.stack = message, message.stack or self.stack
            self.activity = None
        else:
            super()._handle(message)

    @property
    def has_ended(self) -> bool:
        """Whether its machine has reported its end, or was lost."""
        return self._ended is not None

    def kill(self) -> None:
        """Close the stream to the bridge. Then the bridge and the ranks on other machines end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self, timeout_s: float) -> tuple[str, str]:
        """Why the process ended (killed, crash or exit), and a text."""
        del timeout_s  # there is nothing to wait for
        if self._ended is None:
            return "crash", "the bridge to its machine has ended"
        if self._ended.code is None:
            return "killed", f"the connection to its machine {self._ended.machine} was lost"
        reason, text = _explain_end(self._ended.pid, self._ended.code)
        return reason, f"{text} on machine {self._ended.machine}"

    def release(self) -> None:
        """Close the socket."""
        self.socket.close()


def _explain_end(pid: int, code: int) -> tuple[str, str]:
    """Why a process ended, by its exit code (negative for a signal), and a text."""
    if code < 0:
        reason = "killed" if code == -signal.SIGKILL else "crash"
        how = "was killed by" if reason == "killed" else "died of"
        return reason, f"its process {pid} {how} {_signal_name(-code)}"
    return "exit", f"its process {pid} exited with code {code}"


def _signal_name(number: int) -> str:
    """SIGKILL for 9."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
