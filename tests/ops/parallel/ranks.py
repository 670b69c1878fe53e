"""Real processes that are the ranks of a group and run collectives on command.

`Ranks` starts one process, which imports torch and forks into the ranks.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.ops.native.library import load
from ostinato.ops.parallel.collectives import all_reduce, gather_vocab
from ostinato.ops.parallel.distributed_group import DistributedGroup, GroupEndedError
from ostinato.ops.parallel.divided_draws import answer_rank_0, collect_logits, draw_divided
from ostinato.ops.parallel.exchange import Exchange, Share
from ostinato.ops.parallel.group import ParallelGroup
from ostinato.ops.parallel.segment import create_segment
from ostinato.ops.sampling.sample_rows import RowSampling, sample_path, sampling_inputs

_SHARE_OF_DELAYS, _MEAN_DELAY_S = 0.02, 0.0005  # some delays are longer than a rank spins
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


class Draw(NamedTuple):
    """Draws from random logits, whose columns are divided. Rank 0 draws, the others answer.

    Half of the draws are followed by a sum, which every rank begins as soon as it can.
    """

    seed: int
    rows: int
    width: int  # columns of a rank
    is_greedy: bool
    is_whole: bool = False  # rank 0 gets all logits instead

    def part(self, rank: int) -> Tensor:
        """Few different numbers, so some are equal; NaN and -inf are among them."""
        generator = torch.Generator().manual_seed(self.seed * 100 + rank)
        logits = torch.randn(self.rows, self.width, generator=generator)
        logits = (logits * 4).round() / 4
        logits[torch.rand(logits.shape, generator=generator) < 0.05] = float("nan")
        logits[torch.rand(logits.shape, generator=generator) < 0.05] = float("-inf")
        if self.rows > 1:
            logits[-1] = float("-inf")  # no token of the last row is possible
        return logits

    def draws(self, vocab_size: int) -> list[RowSampling]:
        draw = random.Random(self.seed)
        rows: list[RowSampling] = []
        for _ in range(self.rows):
            top_k, top_p = draw.choice([vocab_size, 1, 3]), draw.choice([1.0, 0.7])
            path = sample_path(
                temperature=0.0 if self.is_greedy else draw.choice([0.0, 1.0, 1.0]),
                top_k=top_k,
                top_p=top_p,
                min_p=0.0,
                vocab_size=vocab_size,
            )
            rows.append(RowSampling(path, 1.0, top_k, top_p, 0.0, draw.random()))
        return rows


class Rounds(NamedTuple):
    """Many sums of changing sizes, one straight after the other; every sum is checked.

    With a seed, each rank sleeps before random sums; the ranks sleep before different ones.
    """

    num_sums: int
    seed: int | None = None


Command = Reduce | Gather | Draw | Rounds


def run(
    command: Command, group: ParallelGroup | DistributedGroup, handle: Tensor, exchange: Exchange
) -> Any:
    match command:
        case Reduce():
            result = all_reduce(
                command.partial(group.rank), command.residual(), handle, command.out, exchange
            )
            return result.float().numpy()
        case Gather():
            part = command.part(group.rank)
            return gather_vocab(part, handle, group.world, exchange).numpy()
        case Draw():
            part = command.part(group.rank)
            result = None
            if group.rank:
                answer_rank_0(part, handle)
            elif command.is_whole:
                result = collect_logits(part, handle, group.world).numpy()
            else:
                inputs = sampling_inputs(command.draws(command.width * group.world))
                result = draw_divided(part, inputs, handle).tolist()
            if command.seed % 2:
                run(Rounds(1), group, handle, exchange)
            return result
        case Rounds(count, seed):
            delays = random.Random(f"{seed} {group.rank}")
            for number in range(count):
                if seed is not None and delays.random() < _SHARE_OF_DELAYS:
                    time.sleep(delays.expovariate(1 / _MEAN_DELAY_S))
                x = torch.full((1, 1 + number % 7), float(number % 1000 + group.rank))
                total = all_reduce(x, None, handle, torch.float32, exchange)
                expected = sum(number % 1000 + rank for rank in range(group.world))
                assert total.eq(expected).all(), f"round {number} gave {total}"
            return count


def serve(group: ParallelGroup | DistributedGroup, channel: Connection, exchange: Exchange) -> None:
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
            result, error = run(command, group, handle, exchange), ""
        except (RuntimeError, ValueError, GroupEndedError) as refused:
            result, error = None, str(refused)
        channel.send((result, error, time.process_time() - begin))


def share_through(hub: Connection) -> Share:
    """The channel of a rank to the other ranks, through the process that `pass_on` runs in."""

    def share(data: bytes) -> list[bytes]:
        hub.send(data)
        return hub.recv()

    return share


def pass_on(hubs: list[Connection]) -> None:
    """Give each rank what all ranks have sent, until they have connected or one has ended."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            rows = [hub.recv() for hub in hubs]
            for hub in hubs:
                hub.send(rows)


def main() -> None:
    """The arguments are EXCHANGE FILE SPIN_US TIMEOUT_S CHANNEL..., a channel for each rank."""
    name, file, spin_us, timeout_s, *channels = sys.argv[1:]
    exchange, world = Exchange(name), len(channels)
    hubs = [Pipe() for _ in channels]
    torch.set_num_threads(1)
    load("core")
    for rank, channel in enumerate(channels):
        if os.fork() == 0:
            for other in channels:
                if other != channel:
                    os.close(int(other))
            for ours, _ in hubs:
                ours.close()
            if exchange is Exchange.gloo:
                group = DistributedGroup(rank, world, exchange, timeout_s=float(timeout_s))
                group.connect(share_through(hubs[rank][1]))
                for _, theirs in hubs:
                    theirs.close()
            else:
                group = ParallelGroup(
                    int(file), rank, world, spin_us=int(spin_us), timeout_s=float(timeout_s)
                )
            serve(group, Connection(int(channel)), exchange)
            os._exit(0)
    for channel in channels:
        os.close(int(channel))
    for _, theirs in hubs:
        theirs.close()
    if exchange is Exchange.gloo:
        pass_on([ours for ours, _ in hubs])
    for _ in channels:
        os.wait()


class Ranks:
    """The processes of a group, seen from a test."""

    def __init__(
        self,
        world: int,
        exchange: Exchange = Exchange.shared_memory,
        *,
        spin_us: int = 50,
        timeout_s: float = 60.0,
    ) -> None:
        self.world = world
        self.segment = create_segment(world)
        pairs = [socket.socketpair() for _ in range(world)]
        theirs = [pair[1].fileno() for pair in pairs]
        settings = [exchange.value, self.segment, spin_us, timeout_s, *theirs]
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
