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
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ostinato.graphs.compile_monitor import LateCompile
from ostinato.runtime.errors import RankFailedError, StartupError
from ostinato.runtime.ranks.messages import (
    Answer,
    Arrived,
    Frames,
    LateCompiles,
    LeaderMessage,
    Met,
    RankFailed,
    RankMessage,
    encode_frame,
    rank_decoder,
)
from ostinato.runtime.ranks.rank_activity import Activity, HangRule, read_activity

__all__ = ("RANK_MODULE", "RankLog", "RankProcesses")

RANK_MODULE = "ostinato.runtime.process.rank_main"

_LOG = logging.getLogger(__name__)
_TICK_S = 0.1  # seconds between two checks for a hang while steps run
_CLOSE_S = 2.0  # how long a rank gets to end when its socket closes
_STACK_S = 0.3  # how long a rank that hangs gets to write its stack
_MAX_STACK_BYTES = 1 << 16


class RankLog(NamedTuple):
    """The log settings of the ranks."""

    level: str = "warning"
    log_format: str = "text"  # text | json
    prefix: str = ""  # comes before `rank 1` in the name of the process


class _Rank:
    """The process of one rank after the first."""

    def __init__(self, number: int, log: RankLog) -> None:
        self.number = number
        self.inbox: deque[Arrived | Answer] = deque()
        self.late_compiles: list[LateCompile] = []
        self.frames = Frames()
        self.last_words: RankFailed | None = None
        self.stack_fd = os.memfd_create(f"stack-of-rank-{number}")
        ours, theirs = socket.socketpair()
        self.socket = ours
        # The system kills a child when the thread that started it ends.
        is_main = threading.current_thread() is threading.main_thread()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", RANK_MODULE),
                        *(str(theirs.fileno()), str(self.stack_fd)),
                        *(str(os.getpid() if is_main else 0), log.level, log.log_format),
                        f"{log.prefix}rank {number}",
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self.stack_fd),
                )
        except OSError:
            self.release()
            raise

    @property
    def stack(self) -> str:
        """The stacks of threads that the process wrote on SIGUSR1 or when it crashed."""
        data = os.pread(self.stack_fd, _MAX_STACK_BYTES, 0)
        return data.decode(errors="replace").strip()

    def end(self, timeout_s: float) -> int:
        """Wait until the process ends; kill it after `timeout_s`. Returns its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def release(self) -> None:
        """Close the descriptors."""
        self.socket.close()
        os.close(self.stack_fd)


class RankProcesses:
    """The processes of ranks 1 to N - 1. One thread calls the methods; `close` may be called twice.

    Attributes:
        size: N, the number of ranks of the engine, the calling process included.
        failure: why a rank ended; None while all ranks live.
    """

    def __init__(self, size: int, log: RankLog | None = None) -> None:
        """Start the processes; they import torch and wait for their first message.

        Args:
            size: N, at least 1.
            log: their log settings; None = the defaults.

        Raises:
            StartupError: the system cannot start another process, or is not Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise StartupError(
                "several ranks need Linux; set parallel.tensor=1 and parallel.pipeline=1"
            )
        self.size = size
        self.failure: RankFailedError | None = None
        self._ranks: list[_Rank] = []
        self._changed = threading.Condition()
        self._on_failure: list[Callable[[], object]] = []
        self._is_closing = False
        self._hang_rule: HangRule | None = None
        self._is_working = False  # steps run now and then, so the thread checks for hangs
        self._step: int | None = None  # number of the step that runs
        self._num_steps = 0
        self._wake_in, self._wake_out = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="watch-ranks", daemon=True)
        try:
            for number in range(1, size):
                self._ranks.append(_Rank(number, log or RankLog()))
        except OSError as error:
            self.close()
            raise StartupError(f"a rank's process cannot be started: {error}") from error
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """The process ids in rank order, that of the calling process first."""
        return [os.getpid(), *(rank.process.pid for rank in self._ranks)]

    @property
    def late_compiles(self) -> list[LateCompile]:
        """Late compilations of the ranks after the first."""
        return [one for rank in self._ranks for one in rank.late_compiles]

    def start(
        self,
        messages: list[LeaderMessage],
        descriptors: list[list[int]],
        *,
        hang_limit_s: float,
        on_failure: Callable[[], object],
    ) -> None:
        """Send each rank what it is built from.

        Args:
            messages: one for each rank after the first.
            descriptors: file descriptors for each rank, which gets copies of them.
            hang_limit_s: within a step, a rank may be stopped for this long, and all ranks together
                may be idle for this long.
            on_failure: called by another thread when a rank ends. It must end this rank's waits.

        Raises:
            RankFailedError: a rank has ended.
        """
        self._hang_rule = HangRule(hang_limit_s)
        self._on_failure.append(on_failure)
        if self.failure is not None:
            on_failure()
        for rank, message, passed in zip(self._ranks, messages, descriptors, strict=True):
            with self._sending():
                socket.send_fds(rank.socket, [b"\0"], passed)
                rank.socket.sendall(encode_frame(message))

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
    def step(self) -> Iterator[None]:
        """A context for the part of a step in which ranks wait for each other.

        Raises:
            RankFailedError: a rank has ended. It replaces any other error in the context.
        """
        self._num_steps += 1
        self._step = self._num_steps
        if not self._is_working:
            self._is_working = True
            os.write(self._wake_out, b"\0")
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

    def _read(self, rank: _Rank) -> bool:
        """Read the messages that a rank has sent; False if its process has ended."""
        try:
            data = rank.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        with self._changed:
            for frame in rank.frames.add(data):
                message: RankMessage = rank_decoder.decode(frame)
                if isinstance(message, LateCompiles):
                    rank.late_compiles = message.compiles
                elif isinstance(message, RankFailed):
                    rank.last_words = message
                else:
                    rank.inbox.append(message)
            self._changed.notify_all()
        return bool(data)

    def _look_for_hang(self, elapsed_s: float) -> tuple[int | None, str] | None:
        if self._hang_rule is None or not self._is_working:
            return None
        activities: dict[int, Activity] = {}
        if self._step is not None:
            for number, pid in enumerate(self.pids):
                activity = read_activity(pid, threading.get_native_id())
                if activity is not None:
                    activities[number] = activity
        return self._hang_rule.tick(elapsed_s, self._step, activities)

    def _on_end(self, rank: _Rank) -> None:
        code, words, stack = rank.end(_CLOSE_S), rank.last_words, rank.stack
        where = self._where
        if words is not None:
            reason, text = "error", words.message
            where = where if words.traceback else ""  # without a traceback the message is complete
            stack = "\n".join(filter(None, (words.traceback.strip(), stack)))
        elif code < 0:
            reason = "killed" if code == -signal.SIGKILL else "crash"
            how = "was killed by" if reason == "killed" else "died of"
            text = f"its process {rank.process.pid} {how} {_signal_name(-code)}"
        else:
            reason, text = "exit", f"its process {rank.process.pid} exited with code {code}"
        self._fail(f"rank {rank.number}: {text}{where}", reason, stack)

    def _on_hang(self, number: int | None, text: str) -> None:
        """Let all ranks write their stacks, then end them."""
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGUSR1)
            rank.process.send_signal(signal.SIGCONT)  # a stopped process handles no signal
        end = time.monotonic() + _STACK_S
        while time.monotonic() < end and not all(rank.stack for rank in self._ranks):
            time.sleep(0.01)
        stacks = [f"rank {rank.number}:\n{rank.stack or 'no stack'}" for rank in self._ranks]
        who = "all ranks" if number is None else f"rank {number}"
        self._fail(f"{who}: {text}{self._where}", "hang", "\n".join([*stacks, _own_stacks()]))

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
            rank.process.kill()
        _LOG.error("%s%s", text, f"; its stack:\n{stack}" if stack else "")


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _own_stacks() -> str:
    """The stacks of this process's threads, in the format of the other ranks' stacks."""
    descriptor = os.memfd_create("stack-of-rank-0")
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        return f"rank 0:\n{os.pread(descriptor, _MAX_STACK_BYTES, 0).decode(errors='replace')}"
    finally:
        os.close(descriptor)
