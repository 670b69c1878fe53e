"""Starts, watches and ends the processes of the ranks after the first.

Rank 0 is the calling process. So its results need no transport, and an engine with one rank has no
further process. A thread reads the messages of the other ranks and notices their ends. When a rank
ends or hangs, all others are killed, and every further call raises `RankFailedError`. A group of
ranks is never repaired; its engine is started again.

No rank outlives this process. Each rank watches its socket, which closes when this process ends.
The system also kills the ranks then (PR_SET_PDEATHSIG). Ranks leave no files. Imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ostinato.graphs.compile_monitor import LateCompile
from ostinato.runtime.errors import RankFailedError, StartupError
from ostinato.runtime.ranks.bridge_process import BridgeProcess
from ostinato.runtime.ranks.link_ends import MachineLinks, RankLayout, close_all
from ostinato.runtime.ranks.messages import Answer, Arrived, LeaderMessage, Met, encode_frame
from ostinato.runtime.ranks.rank_activity import Activity, HangRule, read_activity
from ostinato.runtime.ranks.rank_process import LocalRank, RankLog, RemoteRank

__all__ = ("RankProcesses",)

_LOG = logging.getLogger(__name__)
_TICK_S = 0.1  # seconds between two checks for a hang while steps run
_CLOSE_S = 2.0  # how long a rank gets to end when its socket closes
_STACK_S = 0.3  # how long a rank that hangs gets to write its stack
_MAX_STACK_BYTES = 1 << 16


class RankProcesses:
    """The processes of ranks 1 to N - 1. One thread calls the methods; `close` may be called twice.

    Attributes:
        size: N, the number of ranks of the engine, the calling process included.
        failure: why a rank ended, or was killed because it hung; None while all ranks live.
    """

    def __init__(
        self,
        layout: RankLayout,
        log: RankLog | None = None,
        host: str = "",
        silence_s: float = 1.0,
    ) -> None:
        """Start the processes on this machine; they import torch and wait for their first message.

        With ranks on several machines, the other machines join the `bridge`.

        Args:
            layout: the N ranks.
            log: their log settings; None = the defaults.
            host: as `parallel.host`.
            silence_s: a machine that sends nothing for so many seconds counts as lost.

        Raises:
            StartupError: the system cannot start another process, or is not Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise StartupError(
                "several ranks need Linux; set parallel.tensor=1 and parallel.pipeline=1"
            )
        self.size = layout.num_ranks
        self.bridge: BridgeProcess | None = None
        self.failure: RankFailedError | None = None
        self._ranks: list[LocalRank | RemoteRank] = []
        self._changed = threading.Condition()
        self._on_failure: list[Callable[[], object]] = []
        self._is_closing = False
        self._hang_rule: HangRule | None = None
        self._is_working = False  # from a step until `rest`: the thread checks for hangs
        self._step: int | None = None  # number of the step that runs
        self._num_steps = 0
        self._wake_in, self._wake_out = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="watch-ranks", daemon=True)
        try:
            for number in layout.ranks_of(0)[1:]:
                self._ranks.append(LocalRank(number, log or RankLog()))
            if layout.machines > 1:
                self.bridge = BridgeProcess(layout, log or RankLog(), host, silence_s)
                self._ranks += self.bridge.ranks
        except OSError as error:
            self.close()
            raise StartupError(f"a rank's process cannot be started: {error}") from error
        self._thread.start()

    @property
    def late_compiles(self) -> list[LateCompile]:
        """Late compilations of the ranks after the first."""
        return [one for rank in self._ranks for one in rank.late_compiles]

    def start(
        self,
        messages: list[LeaderMessage],
        links: MachineLinks,
        *,
        hang_limit_s: float,
        on_failure: Callable[[], object],
    ) -> None:
        """Send each rank the message and the links that it is built from.

        Args:
            messages: one for each rank after the first.
            links: the links of this machine; closed here, except those of rank 0.
            hang_limit_s: within a step, a rank may be stopped for this long, and all ranks together
                may be idle for this long.
            on_failure: called by another thread when a rank ends. It must end the waits of rank 0.

        Raises:
            RankFailedError: a rank has ended.
        """
        self._hang_rule = HangRule(hang_limit_s)
        self._on_failure.append(on_failure)
        if self.failure is not None:
            on_failure()
        passed = links.ranks[1:]
        try:
            with self._sending():
                if self.bridge is not None:
                    self.bridge.use(links.relay)
                for rank, message in zip(self._ranks, messages, strict=True):
                    if isinstance(rank, LocalRank):
                        socket.send_fds(rank.socket, [b"\0"], passed[rank.number - 1])
                    rank.socket.sendall(encode_frame(message))
        finally:
            close_all(passed)

    def send(self, message: LeaderMessage) -> None:
        """Send a message to all ranks.

        Raises:
            RankFailedError: a rank has ended.
        """
        data = encode_frame(message)
        for rank in self._ranks:
            with self._sending():
                rank.socket.sendall(data)

    def meet(self, name: str, numbers: list[int]) -> list[list[int]]:
        """Wait until all ranks are at this point. The other ranks call `Channel.meet`.

        Raises:
            RankFailedError: a rank has ended.
        """
        rows = [numbers]
        for arrived in self._take():
            assert isinstance(arrived, Arrived), f"{arrived} instead of the meeting {name}"
            assert arrived.name == name, f"a rank is at {arrived.name}, not at {name}"
            rows.append(arrived.numbers)
        self.send(Met(name, rows))
        return rows

    def answers(self) -> list[Answer]:
        """Wait for the answers of all ranks to a `Call`, in rank order.

        Raises:
            RankFailedError: a rank has ended.
        """
        answers: list[Answer] = []
        for answer in self._take():
            assert isinstance(answer, Answer), f"{answer} instead of an answer"
            answers.append(answer)
        return answers

    @contextmanager
    def step(self, *, is_new: bool = True) -> Iterator[None]:
        """A context for the part of a step in which ranks wait for each other.

        Args:
            is_new: False = a further part of the last step.

        Raises:
            RankFailedError: a rank has ended. It replaces any other error in the context.
        """
        self._num_steps += is_new
        self._step = self._num_steps
        if not self._is_working:
            self._is_working = True
            os.write(self._wake_out, b"\0")
            if self.bridge is not None:
                self.bridge.look(is_on=True)
        with self.explained():
            yield
        self._step = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context that replaces an error by `RankFailedError` if the end of a rank caused it."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ConnectionError):  # a link broke; the thread will find the cause
                self._wait_for_failure()
            self.check(error)
            raise

    def check(self, cause: Exception | None = None) -> None:
        """Raise `RankFailedError` if a rank has ended."""
        if self.failure is not None and self.failure is not cause:
            raise self.failure from cause

    def rest(self) -> None:
        """Note that no step follows for now. The thread sleeps until a rank ends or a step runs."""
        self._is_working = False
        if self.bridge is not None:
            self.bridge.look(is_on=False)

    def close(self) -> None:
        """End the processes, with at most 2 s of waiting for each, and close all descriptors."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.socket.shutdown(socket.SHUT_RDWR)
        os.write(self._wake_out, b"\0")
        if self._thread.is_alive():
            self._thread.join()
        for rank in self._ranks:
            rank.end(_CLOSE_S)
            rank.release()
        if self.bridge is not None:
            self.bridge.end(_CLOSE_S)
        os.close(self._wake_in)
        os.close(self._wake_out)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """A context that replaces an error of a socket by the error of the rank that has ended."""
        try:
            yield
        except OSError as error:
            self._wait_for_failure()  # the thread will find the cause
            self.check(error)
            raise

    def _wait_for_failure(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, _CLOSE_S)

    def _take(self) -> Iterator[Arrived | Answer]:
        for rank in self._ranks:
            with self._changed:
                self._changed.wait_for(lambda: rank.inbox or self.failure is not None)  # noqa: B023
                self.check()
                message = rank.inbox.popleft()
            yield message

    def _watch(self) -> None:
        """Read the messages of the ranks, and notice ends and hangs. Runs on a thread."""
        poll = select.poll()
        poll.register(self._wake_in, select.POLLIN)
        by_fd = {rank.socket.fileno(): rank for rank in self._ranks}
        for descriptor in by_fd:
            poll.register(descriptor, select.POLLIN)
        then = time.monotonic()
        while True:
            ready = poll.poll(_TICK_S * 1000 if self._is_working else None)
            if self._is_closing or self.failure is not None:
                return
            for descriptor, _ in ready:
                if descriptor == self._wake_in:
                    os.read(self._wake_in, 4096)
                elif not self._read(by_fd[descriptor]):
                    self._on_end(by_fd[descriptor])
                    return
            now = time.monotonic()
            if now - then >= _TICK_S:
                hang = self._look_for_hang(now - then)
                then = now
                if hang is not None:
                    self._on_hang(*hang)
                    return

    def _read(self, rank: LocalRank | RemoteRank) -> bool:
        """Read the messages that a rank has sent; False if its process has ended."""
        try:
            data = rank.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        with self._changed:
            rank.take(data)
            self._changed.notify_all()
        return bool(data) and not (isinstance(rank, RemoteRank) and rank.has_ended)

    def _look_for_hang(self, elapsed_s: float) -> tuple[int | None, str] | None:
        if self._hang_rule is None or not self._is_working:
            return None
        activities: dict[int, Activity] = {}
        if self._step is not None:
            own = read_activity(os.getpid(), threading.get_native_id())
            found = {0: own, **{rank.number: rank.activity for rank in self._ranks}}
            activities = {number: one for number, one in found.items() if one is not None}
        return self._hang_rule.tick(elapsed_s, self._step, activities)

    def _on_end(self, rank: LocalRank | RemoteRank) -> None:
        (reason, text), error, stack = rank.end(_CLOSE_S), rank.error, rank.stack
        where = self._where
        if error is not None:
            reason, text = "error", error.message
            where = where if error.traceback else ""  # without a traceback the message is complete
            stack = "\n".join(filter(None, (error.traceback.strip(), stack)))
        self._fail(f"rank {rank.number}: {text}{where}", reason, stack)

    def _on_hang(self, number: int | None, text: str) -> None:
        """Let all ranks write their stacks, then end them."""
        if self.bridge is not None:
            self.bridge.request_stacks()
        for rank in self._ranks:
            if isinstance(rank, LocalRank):
                rank.request_stack()
        end = time.monotonic() + _STACK_S
        while time.monotonic() < end and not all(rank.stack for rank in self._ranks):
            for rank in self._ranks:
                if isinstance(rank, RemoteRank):
                    self._read(rank)
            time.sleep(0.01)
        stacks = [f"rank {rank.number}:\n{rank.stack or 'no stack'}" for rank in self._ranks]
        name = "all ranks" if number is None else f"rank {number}"
        self._fail(f"{name}: {text}{self._where}", "hang", "\n".join([*stacks, _own_stacks()]))

    @property
    def _where(self) -> str:
        """The end of a message: what the ranks were doing."""
        if self._num_steps == 0:
            return ", while the engine started"
        return f", in step {self._num_steps}" if self._step else f", after step {self._num_steps}"

    def _fail(self, text: str, reason: str, stack: str) -> None:
        with self._changed:
            if self._is_closing:
                return
            self.failure = RankFailedError(text, reason)
            self._changed.notify_all()
        for end_waits in self._on_failure:
            end_waits()
        for rank in self._ranks:
            rank.kill()
        _LOG.error("%s%s", text, f"; its stack:\n{stack}" if stack else "")


def _own_stacks() -> str:
    """The stacks of this process's threads, in the format of the other ranks' stacks."""
    descriptor = os.memfd_create("stack-of-rank-0")
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        return f"rank 0:\n{os.pread(descriptor, _MAX_STACK_BYTES, 0).decode(errors='replace')}"
    finally:
        os.close(descriptor)
