"""Groups of torch.distributed with gloo between real processes, against groups in shared memory."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.parallel.collectives import all_reduce, gather_vocab
from ostinato.ops.parallel.distributed_group import DistributedGroup, GroupEndedError, group_at
from ostinato.ops.parallel.exchange import Exchange, Share
from tests.ops.parallel.ranks import Gather, Ranks, Reduce, Rounds

SHAPES = st.one_of(
    st.tuples(st.integers(0, 5), st.integers(1, 70)),
    st.sampled_from([(1, 1024), (64, 1024), (131, 1003)]),  # up to three slots of shared memory
)
SUM = Reduce(1, (2, 8), torch.float32, torch.float32, False)


@pytest.fixture(scope="module", params=[2, 3])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, Ranks]]:
    """Two groups with the same number of ranks: in shared memory, and with gloo."""
    pair = Ranks(request.param), Ranks(request.param, Exchange.gloo)
    yield pair
    for ranks in pair:
        ranks.close()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 9),
    shape=SHAPES,
    out=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    has_residual=st.booleans(),
)
def test_sums_in_shared_memory_are_those_of_gloo(
    both: tuple[Ranks, Ranks],
    seed: int,
    shape: tuple[int, int],
    out: torch.dtype,
    has_residual: bool,
) -> None:
    """Sums of two ranks have equal bits: a + b = b + a. Three parts may be added in any order."""
    command = Reduce(seed, shape, torch.float32, out, has_residual)
    memory, gloo = (ranks.results(command) for ranks in both)
    for ours, theirs in zip(memory, gloo, strict=True):
        if both[0].world == 2:
            np.testing.assert_array_equal(ours, theirs)
        else:
            scale = np.abs(ours) + sum(command.partial(rank).abs().numpy() for rank in range(3))
            assert np.all(np.abs(ours - theirs) <= 2 * torch.finfo(out).eps * scale)


@settings(max_examples=20)
@given(seed=st.integers(0, 9), shape=SHAPES, out=st.sampled_from((torch.bfloat16, torch.float16)))
def test_parts_of_few_bits_are_added_by_gloo_in_their_dtype(
    both: tuple[Ranks, Ranks], seed: int, shape: tuple[int, int], out: torch.dtype
) -> None:
    command = Reduce(seed, shape, out, out, True)
    memory, gloo = (ranks.results(command) for ranks in both)
    scale = sum(command.partial(rank).abs().float().numpy() for rank in (0, 1, 2, 99))
    for ours, theirs in zip(memory, gloo, strict=True):
        assert np.all(np.abs(ours - theirs) <= 2 * torch.finfo(out).eps * scale)


@settings(max_examples=20)
@given(seed=st.integers(0, 9), shape=SHAPES)
def test_logits_are_gathered_as_by_gloo(
    both: tuple[Ranks, Ranks], seed: int, shape: tuple[int, int]
) -> None:
    memory, gloo = (ranks.results(Gather(seed, shape)) for ranks in both)
    for ours, theirs in zip(memory, gloo, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spin_us", [50, 0])
def test_a_hundred_thousand_sums_with_random_delays_stay_in_step(spin_us: int) -> None:
    ranks = Ranks(2, spin_us=spin_us)
    assert ranks.results(Rounds(100_000, seed=4)) == [100_000, 100_000]
    ranks.close()


def test_a_wait_ends_when_the_process_of_another_rank_ends() -> None:
    ranks = Ranks(3, Exchange.gloo)
    assert len(ranks.results(SUM)) == 3
    ranks.send(SUM, [0, 1])
    assert not ranks.channels[0].poll(0.2)
    os.kill(ranks.pids[2], signal.SIGKILL)
    for _, error, _ in ranks.answers([0, 1]):
        assert error.startswith(("rank 0: ", "rank 1: "))
    ranks.send(SUM, [0])
    [(_, error, _)] = ranks.answers([0])
    assert error.startswith("rank 0: ")
    ranks.close()


def test_a_group_of_one_has_its_own_values() -> None:
    group = DistributedGroup(0, 1, Exchange.gloo)
    handle = torch.tensor([group.handle])
    assert group_at(handle) is group
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    total = all_reduce(x, residual, handle, torch.float32, Exchange.gloo)
    assert torch.equal(total, x + residual)
    assert torch.equal(gather_vocab(x, handle, 1, Exchange.gloo), x)
    with pytest.raises(ValueError, match="world is 2, and the group has 1 ranks"):
        gather_vocab(x, handle, 2, Exchange.gloo)
    group.abort()
    with pytest.raises(GroupEndedError, match="rank 0: the group of ranks was ended"):
        all_reduce(x, None, handle, torch.float32, Exchange.gloo)
    group.close()


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="has not joined its group of ranks"):
        all_reduce(
            torch.zeros(1, 4),
            None,
            torch.zeros(1, dtype=torch.int64),
            torch.float32,
            Exchange.gloo,
        )


class Meeting:
    """The channel between ranks that are threads of this process."""

    def __init__(self, count: int) -> None:
        self._rows: list[bytes] = [b""] * count
        self._barrier = threading.Barrier(count)

    def share_of(self, number: int) -> Share:
        def share(data: bytes) -> list[bytes]:
            self._rows[number] = data
            self._barrier.wait(60)
            rows = list(self._rows)
            self._barrier.wait(60)
            return rows

        return share


def test_two_groups_of_two_ranks_connect_through_one_channel_and_leave_nothing_open() -> None:
    """Both groups write the same keys into their stores."""

    def run(number: int) -> Tensor:
        group = DistributedGroup(number % 2, 2, Exchange.gloo)
        group.connect(meeting.share_of(number), f"group {number // 2}")
        total = group.all_reduce(torch.tensor([[10.0**number]]), None, torch.float32)
        group.close()
        return total

    before = len(os.listdir("/proc/self/fd"))
    meeting = Meeting(4)
    with ThreadPoolExecutor(4) as pool:
        assert [one.item() for one in pool.map(run, range(4))] == [11, 11, 1100, 1100]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_if_one_rank_cannot_connect_all_ranks_of_all_groups_name_it() -> None:
    """192.0.2.1 is an address that no machine has."""

    def run(number: int) -> str:
        host = "192.0.2.1" if number == 1 else "127.0.0.1"
        group = DistributedGroup(number % 2, 2, Exchange.gloo, host=host)
        with pytest.raises(GroupEndedError) as raised:
            group.connect(meeting.share_of(number), f"group {number // 2}")
        return str(raised.value)

    meeting = Meeting(4)
    with ThreadPoolExecutor(4) as pool:
        texts = set(pool.map(run, range(4)))
    assert len(texts) == 1
    assert texts.pop().startswith("rank 1: ")


def test_abort_ends_a_connection_that_another_rank_never_makes() -> None:
    """The other rank takes part in the rounds of `share`, but does not connect."""
    group = DistributedGroup(0, 2, Exchange.gloo)
    rounds: list[bytes] = []

    def share(data: bytes) -> list[bytes]:
        rounds.append(data)
        if len(rounds) == 3:
            group.abort()
        silent = msgspec.msgpack.encode(["", {}, False, ""])
        return [data, silent]

    with pytest.raises(GroupEndedError, match="rank 0: the group of ranks was ended"):
        group.connect(share)
    assert len(rounds) == 3
