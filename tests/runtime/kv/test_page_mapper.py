"""Pages of the KV cache are mapped before they are used, and only those needed soon."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ostinato.models.kv_cache import KVCacheSpec
from ostinato.runtime.kv.block_pool import BlockPool
from ostinato.runtime.kv.page_mapper import CachePages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype=torch.bfloat16)
NUM_BLOCKS = (400 << 20) // SPEC.bytes_per_block
AHEAD = (256 << 20) // SPEC.bytes_per_block
AHEAD_AT_START = (32 << 20) // SPEC.bytes_per_block


def resident(tensor: Tensor) -> float:
    """The share of a tensor's pages that are in memory, as the system counts them."""
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    num_pages = (tensor.data_ptr() + tensor.nbytes - begin) // page
    flags = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(begin, num_pages * page, flags) == 0
    return sum(flag & 1 for flag in flags) / num_pages


@pytest.fixture
def cache() -> list[tuple[Tensor, Tensor]]:
    return SPEC.allocate(NUM_BLOCKS, torch.device("cpu"))


@pytest.fixture
def pages(cache: list[tuple[Tensor, Tensor]]) -> Iterator[CachePages]:
    pages = CachePages(cache, SPEC.bytes_per_block)
    yield pages
    pages.close()


def test_a_cache_takes_no_memory_and_begins_at_a_page(cache: list[tuple[Tensor, Tensor]]) -> None:
    for side in (side for layer in cache for side in layer):
        assert side.data_ptr() % mmap.PAGESIZE == 0
        assert resident(side) == 0.0
    side[-1] = 1.0
    assert float(side[-2:].float().mean()) == 0.5


def test_the_next_blocks_are_mapped_and_no_others(
    cache: list[tuple[Tensor, Tensor]], pages: CachePages
) -> None:
    assert pages.wait(60.0)
    if pages._mapped == 0:
        pytest.skip("this system does not map pages on request")
    assert pages._mapped == AHEAD_AT_START  # the start of an engine needs the processor
    pages.set_busy(False)
    assert pages.wait(60.0)
    assert pages._mapped == AHEAD + 1
    share = (AHEAD + 1) / NUM_BLOCKS
    for side in (side for layer in cache for side in layer):
        assert share - 0.01 <= resident(side) <= share + 0.05  # the last huge page reaches beyond


def test_contents_stay_as_blocks_are_used_up(
    cache: list[tuple[Tensor, Tensor]], pages: CachePages
) -> None:
    cache[1][0][AHEAD + 2] = 3.0
    cache[0][1][5] = 4.0
    pages.use(AHEAD // 2)
    assert pages.wait(60.0)
    pages.use(NUM_BLOCKS - 1)
    assert pages.wait(60.0)
    assert pages._mapped in (0, NUM_BLOCKS)
    assert bool((cache[1][0][AHEAD + 2] == 3.0).all())
    assert bool((cache[0][1][5] == 4.0).all())
    assert float(cache[0][0].float().abs().max()) == 0.0


def test_nothing_is_mapped_beside_a_step(pages: CachePages) -> None:
    pages.set_busy(True)
    mapped = pages._mapped
    pages.use(AHEAD)
    assert not pages.wait(0.2)
    piece = (2 << 20) // (SPEC.bytes_per_block // 4)
    assert pages._mapped <= mapped + piece  # a piece that is being mapped is finished
    pages.set_busy(False)
    assert pages.wait(60.0)


def test_a_pool_knows_how_far_it_came() -> None:
    pool = BlockPool(10)
    assert pool.highest_block_id == 0
    first = pool.allocate(3)
    assert first is not None
    assert pool.highest_block_id == 3
    pool.free(first)
    assert pool.allocate(2) == first[:2]
    assert pool.highest_block_id == 3
    assert pool.allocate(6) is not None
    assert pool.highest_block_id == 8
    assert pool.allocate(0) == []
