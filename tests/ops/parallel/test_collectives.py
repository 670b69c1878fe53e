"""Collectives between real processes, compared with sums of the same numbers in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.native.library import load
from ostinato.ops.parallel.collectives import all_reduce, gather_vocab
from ostinato.ops.parallel.divided_draws import answer_rank_0, collect_logits, draw_divided
from ostinato.ops.parallel.group import ParallelGroup
from ostinato.ops.parallel.segment import MAX_RANKS, create_segment
from ostinato.ops.sampling.sample_rows import RowSampling, SamplePath, sample_each, sampling_inputs
from tests.ops.parallel.ranks import Draw, Gather, Ranks, Reduce, Rounds

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def two_and_three() -> Iterator[dict[int, Ranks]]:
    groups = {world: Ranks(world) for world in (2, 3)}
    yield groups
    for ranks in groups.values():
        ranks.close()


def in_rank_order(command: Reduce, world: int) -> Tensor:
    total = command.partial(0).float()
    for rank in range(1, world):
        total = total + command.partial(rank).float()
    residual = command.residual()
    if residual is not None:
        total = total + residual.float()
    return total.to(command.out).float()


sizes = st.one_of(
    st.tuples(st.integers(0, 5), st.integers(1, 70)),
    st.sampled_from(
        [(1, 1024), (7, 1000), (64, 1024), (131, 1003)]
    ),  # up to 3 slots of the segment
)


@settings(max_examples=60)
@given(
    world=st.sampled_from([2, 3]),
    seed=st.integers(0, 9),
    shape=sizes,
    out=st.sampled_from(FLOATS),
    is_float=st.booleans(),
    has_residual=st.booleans(),
)
def test_sums_have_the_order_of_the_ranks(
    two_and_three: dict[int, Ranks],
    world: int,
    seed: int,
    shape: tuple[int, int],
    out: torch.dtype,
    is_float: bool,
    has_residual: bool,
) -> None:
    command = Reduce(seed, shape, torch.float32 if is_float else out, out, has_residual)
    expected = in_rank_order(command, world)
    for result in two_and_three[world].results(command):
        assert torch.equal(torch.from_numpy(result), expected)


@settings(max_examples=30)
@given(world=st.sampled_from([2, 3]), seed=st.integers(0, 9), shape=sizes)
def test_logits_stand_side_by_side(
    two_and_three: dict[int, Ranks], world: int, seed: int, shape: tuple[int, int]
) -> None:
    command = Gather(seed, shape)
    expected = torch.cat([command.part(rank) for rank in range(world)], 1)
    for result in two_and_three[world].results(command):
        assert torch.equal(torch.from_numpy(result), expected)


@settings(max_examples=60)
@given(
    world=st.sampled_from([2, 3]),
    seed=st.integers(0, 99),
    shape=st.one_of(
        st.tuples(st.integers(1, 9), st.integers(1, 70)),
        st.sampled_from([(1, 1000), (40, 5000), (7, 70_000)]),  # up to 8 slots of the segment
    ),
    is_greedy=st.booleans(),
    is_whole=st.booleans(),
)
def test_divided_logits_give_the_tokens_of_whole_ones(
    two_and_three: dict[int, Ranks],
    world: int,
    seed: int,
    shape: tuple[int, int],
    is_greedy: bool,
    is_whole: bool,
) -> None:
    load("core")  # plain torch takes another token if logits are NaN
    command = Draw(seed, *shape, is_greedy, is_whole)
    logits = torch.cat([command.part(rank) for rank in range(world)], 1)
    found, *others = two_and_three[world].results(command)
    assert others == [None] * (world - 1)
    if is_whole:
        assert torch.equal(torch.from_numpy(found).nan_to_num(), logits.nan_to_num())
    else:
        assert (
            found == sample_each(logits, sampling_inputs(command.draws(logits.shape[1]))).tolist()
        )


def test_many_rounds_stay_in_step(two_and_three: dict[int, Ranks]) -> None:
    for ranks in two_and_three.values():
        assert ranks.results(Rounds(5000)) == [5000] * ranks.world


SUM = Reduce(1, (2, 8), torch.float32, torch.float32, False)


def test_a_waiting_rank_sleeps_and_ends_with_its_group() -> None:
    ranks = Ranks(2)
    assert len(ranks.results(SUM)) == 2
    ranks.send(SUM, [0])
    os.kill(ranks.pids[1], signal.SIGKILL)
    assert not ranks.channels[0].poll(1.0)  # it waits for a rank that will not come
    watcher = ParallelGroup(ranks.segment, 1, 2)
    watcher.abort()
    [(_, error, cpu_seconds)] = ranks.answers([0])
    assert error == "rank 0: the group of ranks was ended while rank 1 was awaited"
    assert cpu_seconds < 0.3
    ranks.send(SUM, [0])
    [(_, error, _)] = ranks.answers([0])
    assert error == "rank 0: the group of ranks was ended"
    watcher.close()
    ranks.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = Ranks(3, spin_us=0, timeout_s=0.3)
    ranks.send(SUM, [0, 1])
    errors = {error for _, error, _ in ranks.answers([0, 1])}
    # The first rank that gives up ends the wait of the other.
    assert any("rank 2 of 3 did not join the exchange within 300 ms" in error for error in errors)
    assert all("rank 2" in error for error in errors)
    ranks.close()


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match=f"a group has 1 to {MAX_RANKS} ranks, got 0"):
        create_segment(0)
    segment = create_segment(3)
    with pytest.raises(ValueError, match="not the segment of a group of 2 ranks"):
        ParallelGroup(segment, 0, 2)
    with pytest.raises(ValueError, match="rank 3 is not in a group of 3"):
        ParallelGroup(segment, 3, 3)
    os.close(segment)
    load("core")
    x, no_group = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="has not joined its group of ranks"):
        all_reduce(x, None, no_group, torch.float32)
    with pytest.raises(ValueError, match="has not joined its group of ranks"):
        gather_vocab(x, no_group, 2)


def test_wrong_arguments_are_refused_before_a_rank_waits() -> None:
    segment = create_segment(2)
    group = ParallelGroup(segment, 0, 2)
    os.close(segment)
    handle = torch.tensor([group.handle])
    x = torch.zeros(3, 4)
    for partial, residual, dtype, words in (
        (x.T, None, torch.float32, "partial must be a contiguous matrix"),
        (x.half(), None, torch.float32, "partial must be float32 or of the result's dtype"),
        (x, x.bfloat16(), torch.float32, "residual must be a contiguous matrix"),
        (x, x[:2], torch.float32, "residual must be a contiguous matrix"),
        (x, None, torch.int32, "dtype must be float32, bfloat16 or float16, got int32"),
    ):
        with pytest.raises(ValueError, match=words):
            all_reduce(partial, residual, handle, dtype)
    with pytest.raises(ValueError, match="world must be the number of the group's ranks"):
        gather_vocab(x, handle, 3)
    greedy = sampling_inputs([RowSampling(SamplePath.greedy, 1.0, 8, 1.0, 0.0, 0.0)])
    with pytest.raises(ValueError, match="part must be a contiguous float32 matrix"):
        draw_divided(x.T, greedy, handle)
    with pytest.raises(ValueError, match="inputs must be a contiguous float64 matrix"):
        draw_divided(x, greedy, handle)
    with pytest.raises(ValueError, match="world must be the number of the group's ranks"):
        collect_logits(x, handle, 3)
    with pytest.raises(ValueError, match="rank 0 has nothing to answer"):
        answer_rank_0(x, handle)
    group.close()
