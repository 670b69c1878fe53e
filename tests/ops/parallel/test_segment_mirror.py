"""Sums of ranks on two machines: two segments, and threads that carry pieces between them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ostinato.ops.parallel.collectives import all_reduce
from ostinato.ops.parallel.exchange import Exchange
from ostinato.ops.parallel.group import ParallelGroup
from ostinato.ops.parallel.segment import SegmentMirror, create_segment
from ostinato.ops.sampling.sample_rows import sample_each, sampling_inputs
from tests.ops.parallel.ranks import Draw, run

MACHINES = [[0, 1], [2]]
WORLD = 3


class Site:
    """Three ranks on two machines. A thread per rank carries its pieces to the other machine."""

    def __init__(self) -> None:
        self.groups: list[ParallelGroup] = []
        self._mirrors: list[SegmentMirror] = []
        self._notices: list[list[int]] = []
        for ranks in MACHINES:
            segment = create_segment(WORLD)
            notices = [os.eventfd(0) for _ in ranks]
            for rank, notice in zip(ranks, notices, strict=True):
                passed = os.dup(notice)
                group = ParallelGroup(segment, rank, WORLD, spin_us=0, notify=passed)
                self.groups.append(group)
            self._mirrors.append(SegmentMirror(segment, WORLD))
            self._notices.append(notices)
            os.close(segment)
        self._ends = False
        self._threads = [
            threading.Thread(target=self._carry, args=(machine, place))
            for machine, ranks in enumerate(MACHINES)
            for place in range(len(ranks))
        ]
        self._putting = threading.Lock()
        for thread in self._threads:
            thread.start()

    def _carry(self, machine: int, place: int) -> None:
        rank = MACHINES[machine][place]
        while True:
            os.eventfd_read(self._notices[machine][place])
            if self._ends:
                return
            for piece in self._mirrors[machine].take(rank):
                with self._putting:
                    self._mirrors[1 - machine].put(rank, piece)

    def close(self) -> None:
        self._ends = True
        for notice in (one for each in self._notices for one in each):
            os.eventfd_write(notice, 1)
        for thread in self._threads:
            thread.join()
        for group in self.groups:
            group.close()
        for notice in (one for each in self._notices for one in each):
            os.close(notice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_order_of_the_ranks_and_the_same_bits_on_both_machines(
    dtype: torch.dtype,
) -> None:
    site = Site()
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 1), (1, 1024), (5, 333), (131, 1003), (0, 8), (64, 1024)]  # up to three slots
    steps = [
        [torch.randn(shape, generator=generator) for _ in range(WORLD)] for shape in 3 * shapes
    ]

    def run(rank: int) -> list[torch.Tensor]:
        handle = torch.tensor([site.groups[rank].handle])
        return [all_reduce(parts[rank], None, handle, dtype) for parts in steps]

    try:
        with ThreadPoolExecutor(WORLD) as pool:
            results = list(pool.map(run, range(WORLD)))
    finally:
        site.close()
    for number, parts in enumerate(steps):
        expected = (parts[0] + parts[1] + parts[2]).to(dtype)
        assert all(torch.equal(result[number], expected) for result in results)


def test_tokens_are_drawn_from_logits_of_both_machines() -> None:
    """Ranks that do not wait for each other stay within the two slots of each rank."""
    site = Site()
    commands = [
        Draw(seed, 7, 30_000, is_greedy=seed % 3 == 0, is_whole=seed % 3 == 1) for seed in range(6)
    ]

    def run_all(rank: int) -> list[object]:
        group = site.groups[rank]
        handle = torch.tensor([group.handle])
        return [run(command, group, handle, Exchange.shared_memory) for command in commands]

    try:
        with ThreadPoolExecutor(WORLD) as pool:
            results, *_ = list(pool.map(run_all, range(WORLD)))
    finally:
        site.close()
    for command, found in zip(commands, results, strict=True):
        logits = torch.cat([command.part(rank) for rank in range(WORLD)], 1)
        if command.is_whole:
            found = torch.as_tensor(found)
            assert torch.equal(found.nan_to_num(), logits.nan_to_num())
        else:
            assert (
                found
                == sample_each(logits, sampling_inputs(command.draws(logits.shape[1]))).tolist()
            )


def test_a_piece_that_is_too_large_and_a_strange_segment_are_refused() -> None:
    segment = create_segment(2)
    try:
        mirror = SegmentMirror(segment, 2)
        with pytest.raises(ValueError, match="does not fit"):
            mirror.put(1, bytes(1 << 20))
        with pytest.raises(ValueError, match="not the segment of a group of 3 ranks"):
            SegmentMirror(segment, 3)
    finally:
        os.close(segment)
