"""`BridgeProcess`: the process that connects rank 0 with the other machines of its engine.

It is a process of its own, because rank 0 computes while values come and go. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

from ostinato.runtime.errors import StartupError
from ostinato.runtime.ranks.bridge_messages import (
    BridgeMessage,
    DumpStacks,
    Listening,
    Look,
    StartBridge,
    UseEnds,
    bridge_decoder,
    encode_framed,
)
from ostinato.runtime.ranks.link_ends import RankLayout, RelayEnds, close_all
from ostinato.runtime.ranks.messages import Frames
from ostinato.runtime.ranks.rank_process import RankLog, RemoteRank
from ostinato.runtime.secure_connection import new_token

__all__ = ("BRIDGE_MODULE", "BridgeProcess")

BRIDGE_MODULE = "ostinato.runtime.process.bridge_main"


class BridgeProcess:
    """The bridge of rank 0's machine, a child of this process. It ends with this process.

    Attributes:
        ranks: the ranks on other machines, which send and receive through the bridge.
        token: the secret with which the other machines join it.
    """

    def __init__(self, layout: RankLayout, log: RankLog, host: str, silence_s: float) -> None:
        """Start the process.

        Args:
            layout: the ranks of the engine.
            log: how the bridge writes its log.
            host: as `parallel.host`.
            silence_s: a machine that sends nothing for so many seconds counts as lost.

        Raises:
            OSError: the system cannot start another process.
        """
        self.token = new_token()
        self.ranks: list[RemoteRank] = []
        self._address: str | None = None
        self._control, theirs = socket.socketpair()
        is_main = threading.current_thread() is threading.main_thread()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", BRIDGE_MODULE, str(theirs.fileno())),
                    *(str(os.getpid() if is_main else 0), log.level, log.log_format),
                    f"{log.prefix}bridge",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        streams: list[socket.socket] = []
        try:
            for number in range(layout.ranks_per_machine, layout.num_ranks):
                ours, other = socket.socketpair()
                streams.append(other)
                self.ranks.append(RemoteRank(number, ours))
            start = StartBridge(layout, host, self.token, silence_s)
            self._send(start, [stream.fileno() for stream in streams])
        finally:
            for stream in streams:
                stream.close()

    def address(self) -> str:
        """The address at which other machines join the bridge. Waits until the bridge listens.

        Raises:
            StartupError: the bridge cannot listen.
        """
        if self._address is None:
            frames, found = Frames(), list[bytes]()
            while not found:
                data = self._control.recv(1 << 12)
                if not data:
                    raise StartupError("the bridge to other machines has ended; its log is above")
                found = frames.add(data)
            message = bridge_decoder.decode(found[0])
            assert isinstance(message, Listening), f"{message} came first"
            if message.error:
                raise StartupError(message.error)
            self._address = message.address
        return self._address

    def use(self, ends: RelayEnds) -> None:
        """Let the bridge carry values between the machines; closes the descriptors of `ends`.

        Raises:
            OSError: the bridge has ended.
        """
        try:
            self._send(UseEnds(ends), ends.descriptors())
        finally:
            close_all([ends.descriptors()])

    def look(self, *, is_on: bool) -> None:
        """Let the other machines begin, or stop, to report what their ranks do."""
        self._tell(Look(is_on))

    def request_stacks(self) -> None:
        """Let the ranks on other machines write their stacks."""
        self._tell(DumpStacks())

    def end(self, timeout_s: float) -> None:
        """Close the socket to the bridge, and wait for its end. Kill it after `timeout_s`."""
        self._control.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _tell(self, message: BridgeMessage) -> None:
        with contextlib.suppress(OSError):  # the ranks' sockets show that the bridge has ended
            self._send(message, [])

    def _send(self, message: BridgeMessage, descriptors: list[int]) -> None:
        data = encode_framed(message)
        if descriptors:
            sent = socket.send_fds(self._control, [data], descriptors)
            data = data[sent:]
        self._control.sendall(data)
