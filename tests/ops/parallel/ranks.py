"""Real processes that are the ranks of a group and run collectives on command.

`Ranks` starts one process, which imports torch and forks into the ranks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.ops.native.library import load
from ostinato.ops.parallel.collectives import all_reduce, gather_vocab
from ostinato.ops.parallel.group import ParallelGroup
from ostinato.ops.parallel.segment import create_segment

_START = "from tests.ops.parallel.ranks import main; main()"


class Reduce(NamedTuple):
    """An `all_reduce` of random numbers."""

    seed: int
    shape: tuple[int, int]
    dtype: torch.dtype  # the dtype of the partial sums
    out: torch.dtype
    has_residual: bool

    def partial(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100 + rank)
        return torch.randn(self.shape, generator=generator).to(self.dtype)

    def residual(self) -> Tensor | None:
        return self.partial(99).to(self.out) if self.has_residual else None


class Gather(NamedTuple):
    """A `gather_vocab` of random numbers."""

    seed: int
    shape: tuple[int, int]

    def part(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100 + rank)
        return torch.randn(self.shape, generator=generator)


class Rounds(NamedTuple):
    """Many sums of changing sizes, one straight after the other; every sum is checked."""

    count: int


Command = Reduce | Gather | Rounds


def run(command: Command, group: ParallelGroup, handle: Tensor) -> Any:
    match command:
        case Reduce():
            result = all_reduce(
                command.partial(group.rank), command.residual(), handle, command.out
            )
            return result.float().numpy()
        case Gather():
            return gather_vocab(command.part(group.rank), handle, group.world).numpy()
        case Rounds(count):
            for number in range(count):
                x = torch.full((1, 1 + number % 7), float(number % 1000 + group.rank))
                total = all_reduce(x, None, handle, torch.float32)
                expected = sum(number % 1000 + rank for rank in range(group.world))
                assert total.eq(expected).all(), f"round {number} gave {total}"
            return count


def serve(group: ParallelGroup, channel: Connection) -> None:
    """Answer commands until the channel closes: (result or None, error text, CPU seconds)."""
    handle = torch.tensor([group.handle])
    channel.send(os.getpid())
    while True:
        try:
            command = channel.recv()
        except EOFError:
            return
        begin = time.process_time()
        try:
            result, error = run(command, group, handle), ""
        except (RuntimeError, ValueError) as refused:
            result, error = None, str(refused)
        channel.send((result, error, time.process_time() - begin))


def main() -> None:
    """The arguments are SEGMENT SPIN_US TIMEOUT_S CHANNEL..., with a channel for each rank."""
    segment, spin_us, timeout_s, *channels = sys.argv[1:]
    torch.set_num_threads(1)
    load("core")
    for rank, channel in enumerate(channels):
        if os.fork() == 0:
            for other in channels:
                if other != channel:
                    os.close(int(other))
            group = ParallelGroup(
                int(segment), rank, len(channels), spin_us=int(spin_us), timeout_s=float(timeout_s)
            )
            serve(group, Connection(int(channel)))
            os._exit(0)
    for channel in channels:
        os.close(int(channel))
    for _ in channels:
        os.wait()


class Ranks:
    """The processes of a group, seen from a test."""

    def __init__(self, world: int, *, spin_us: int = 50, timeout_s: float = 60.0) -> None:
        self.world = world
        self.segment = create_segment(world)
        pairs = [socket.socketpair() for _ in range(world)]
        theirs = [pair[1].fileno() for pair in pairs]
        settings = [self.segment, spin_us, timeout_s, *theirs]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, settings)],
            pass_fds=(self.segment, *theirs),
            cwd=Path(__file__).parents[3],
        )
        self.channels = [Connection(pair[0].detach()) for pair in pairs]
        for _, other in pairs:
            other.close()
        self.pids: list[int] = [channel.recv() for channel in self.channels]

    def send(self, command: Command, ranks: list[int] | None = None) -> None:
        for rank in range(self.world) if ranks is None else ranks:
            self.channels[rank].send(command)

    def answers(self, ranks: list[int] | None = None) -> list[tuple[Any, str, float]]:
        return [
            self.channels[rank].recv() for rank in (range(self.world) if ranks is None else ranks)
        ]

    def results(self, command: Command) -> list[Any]:
        """The results of all ranks."""
        self.send(command)
        answers = self.answers()
        assert [error for _, error, _ in answers] == [""] * self.world
        return [result for result, _, _ in answers]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self._process.wait(30)
        os.close(self.segment)
