"""The layers of a cache share the bytes of a block without overlapping."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.models.kv_cache import KVCache, KVCacheSpec
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup, kv_groups

CPU = torch.device("cpu")
NUM_BLOCKS = 4
WINDOWS = st.lists(st.sampled_from([0, 0, 5, -7]), min_size=1, max_size=12).map(tuple)


def make_spec(
    windows: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    groups: tuple[KVGroup, ...] | None = None,
) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=len(windows),
        num_kv_heads=2,
        head_dim=8,
        value_dim=16,
        block_size=8,
        dtype=dtype,
        windows=windows,
        groups=groups or kv_groups(windows, 100),
    )


@given(WINDOWS, st.integers(0, 11), st.integers(1, 12))
def test_no_layer_overwrites_another(windows: tuple[int, ...], first: int, count: int) -> None:
    # A stage of a pipeline has some of the layers, and the groups of the whole model.
    groups, own = kv_groups(windows, 100), windows[first % len(windows) :][:count]
    cache = make_spec(own, groups=groups).allocate(NUM_BLOCKS, CPU)
    assert len(cache) == len(own)
    kinds = [int(len(groups) > 1 and window != 0) for window in own]
    # Blocks 1 and 3 belong to the first group, and block 2 to the last.
    owners = {1: 0, 2: len(groups) - 1, 3: 0}
    for layer, (sides, kind) in enumerate(zip(cache, kinds, strict=True)):
        for block, owner in owners.items():
            for side in sides if owner == kind else ():
                assert side.is_contiguous()
                side[block * groups[kind].pieces] = 100 * layer + block
    for layer, (sides, kind) in enumerate(zip(cache, kinds, strict=True)):
        for block, owner in owners.items():
            for side in sides if owner == kind else ():
                assert (side[block * groups[kind].pieces] == 100 * layer + block).all()
    for page in cache.pages:
        assert page.is_contiguous()
        assert len(page) == NUM_BLOCKS
        assert (page[0] == 0).all(), "a layer wrote into the null block"
        assert ((page[2] == 0) | (page[2] % 100 == 2)).all()


def test_bytes_of_tokens_and_blocks() -> None:
    # 5 layers with blocks of 6 * 8 tokens, and 29 layers with blocks of 8: 5 slots for 48 tokens.
    windows = (*(0, 5, 5, 5, 5, 5) * 4, 0, *(5,) * 9)
    spec = make_spec(windows, torch.bfloat16)
    assert [(group.units, group.pieces) for group in spec.groups] == [(6, 1), (1, 6)]
    per_token = 2 * (8 + 16) * 2  # heads, elements of a key and a value, bytes
    assert spec.bytes_per_token == 34 * per_token
    assert spec.bytes_per_block == 5 * 48 * per_token
    cache = spec.allocate(3, CPU)
    assert sum(page.nbytes for page in cache.pages) == 3 * spec.bytes_per_block
    assert cache[0][0].shape == (3, 2, 48, 8)
    assert [tuple(side.shape) for side in cache[1]] == [(18, 2, 8, 8), (18, 2, 8, 16)]
    assert cache[2][0].shape == (17, 2, 8, 8)
    whole = KVCacheSpec(
        num_layers=34, num_kv_heads=2, head_dim=8, value_dim=16, block_size=8, dtype=torch.bfloat16
    )
    assert whole.groups == WHOLE_CACHE
    assert whole.bytes_per_block == 8 * whole.bytes_per_token == 8 * 34 * per_token


def test_pages_of_a_plain_list_are_the_tensors_of_its_layers() -> None:
    sides = [torch.zeros(2, 1, 8, 4) for _ in range(4)]
    cache = KVCache([(sides[0], sides[1]), (sides[2], sides[3])])
    assert all(page is side for page, side in zip(cache.pages, sides, strict=True))
