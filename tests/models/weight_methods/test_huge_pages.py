"""Weights in huge pages: their contents, their addresses, and when their memory is returned."""

from __future__ import annotations

import copy
import gc
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.models.weight_methods.huge_pages import (
    HUGE_PAGE,
    WeightMemory,
    zeroed,
)


def is_mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(place, 16) for place in line.split(maxsplit=1)[0].split("-"))
        if first <= address < end:
            return True
    return False


@given(st.lists(st.integers(0, 40 << 20), min_size=1, max_size=12), st.integers(0, 3))
def test_matrices_lie_apart_and_keep_their_values(sizes: list[int], seed: int) -> None:
    memory = WeightMemory()
    given_values = [
        torch.full((size,), (index + seed) % 251, dtype=torch.uint8)
        for index, size in enumerate(sizes)
    ]
    moved = [memory.moved(value) for value in given_values]
    for value, tensor in zip(given_values, moved, strict=True):
        assert torch.equal(value, tensor)
    places = sorted((one.data_ptr(), one.nbytes) for one in moved if one.nbytes)
    assert all(first + size <= after for (first, size), (after, _) in pairwise(places))
    small = [one for one in moved if 0 < one.nbytes <= 32 << 20]
    assert all(one.data_ptr() % 64 == 0 for one in small)
    if small and small[0] is moved[0]:
        assert small[0].data_ptr() % HUGE_PAGE == 0


def test_dtype_and_shape_stay() -> None:
    tensor = torch.randn(3, 5, dtype=torch.bfloat16)
    moved = WeightMemory().moved(tensor)
    assert moved.dtype is torch.bfloat16
    assert torch.equal(moved, tensor)
    assert moved.storage_offset() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_returned_with_its_last_matrix() -> None:
    memory = WeightMemory()
    tensors = [memory.moved(torch.zeros(1 << 20, dtype=torch.uint8)) for _ in range(4)]
    first, last = tensors[0].data_ptr(), tensors.pop()
    del memory, tensors
    gc.collect()
    assert is_mapped(first), "the chunk is unmapped, but a matrix still lies in it"
    del last
    gc.collect()
    assert not is_mapped(first)


def test_a_copy_of_a_layer_takes_memory_from_the_same_chunk() -> None:
    memory = WeightMemory()
    first = memory.moved(torch.ones(64))
    second = copy.deepcopy(memory).moved(torch.ones(64))
    assert second.data_ptr() == first.data_ptr() + first.nbytes


def test_memory_without_values() -> None:
    memory = WeightMemory()
    assert memory.empty((0, 4), torch.float32).shape == (0, 4)
    large = memory.empty((33 << 20,), torch.uint8)
    assert large.data_ptr() % HUGE_PAGE == 0
    first, second = (memory.empty((3, 5), torch.bfloat16) for _ in range(2))
    assert first.shape == (3, 5)
    assert first.dtype is torch.bfloat16
    assert second.data_ptr() - first.data_ptr() == 64


@pytest.mark.parametrize("num_rows", [1, HUGE_PAGE // 64, HUGE_PAGE // 16])
def test_memory_of_its_own(num_rows: int) -> None:
    tensor = zeroed((num_rows, 16), torch.float32)
    assert tensor.shape == (num_rows, 16)
    assert not tensor.any()
    if tensor.nbytes >= HUGE_PAGE:
        assert tensor.data_ptr() % HUGE_PAGE == 0
