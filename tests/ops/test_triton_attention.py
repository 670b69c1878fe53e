"""The triton backend without a GPU: the code outside its kernels."""

from __future__ import annotations

import pytest
import torch

from ostinato.graphs.buckets import GraphKey
from ostinato.ops.attention import AttentionSpec, PlannedTable, load_backend
from ostinato.ops.backends.triton_tiles import KernelShape, TileShape

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")


def spec(**more: object) -> AttentionSpec:
    values = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "block_size": 16,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda"),
    }
    return AttentionSpec(**(values | more))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"device": torch.device("cpu")}, "needs a CUDA device, but the model is on cpu"),
        pytest.param(
            {},
            "needs a CUDA device, none is visible",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_why_unsupported_names_the_device(more: dict[str, object], reason: str) -> None:
    assert load_backend("triton").why_unsupported(spec(**more)) == reason


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"head_dim": 80}, None),
        ({"dtype": torch.float32}, None),
        (
            {"dtype": torch.float64},
            "needs float16, bfloat16 or float32, but the model has torch.float64",
        ),
        (
            {"head_dim": 8},
            "needs a head size in [16, 256] that is a multiple of 8, but the model has 8",
        ),
        ({"head_dim": 192, "value_dim": 128}, None),
        (
            {"value_dim": 512},
            "needs a head size in [16, 256] that is a multiple of 8, but the model has 512",
        ),
        (
            {"num_heads": 256, "num_kv_heads": 1},
            "needs at most 128 query heads per KV head, but the model has 256",
        ),
        (
            {"block_size": 24},
            "needs a block size that is a power of two, cache.block_size is 24",
        ),
    ],
)
def test_why_a_shape_is_unsupported(more: dict[str, object], reason: str | None) -> None:
    from ostinato.ops.backends.triton import why_shape_unsupported

    assert why_shape_unsupported(spec(**more)) == reason


def test_the_planner_tells_decode_from_the_rest() -> None:
    from ostinato.ops.backends.triton import BACKEND

    planner = BACKEND.make_planner(spec(), [], tables=[PlannedTable(16, 8)])
    handle = torch.zeros(1, dtype=torch.int64)
    host = None  # the planner does not read the step
    planner.plan(GraphKey(4, 4, 1), host, handle)  # pyright: ignore[reportArgumentType]
    assert handle.tolist() == [1]
    planner.plan(GraphKey(64, 4, 0), host, handle)  # pyright: ignore[reportArgumentType]
    assert handle.tolist() == [0]


def kernel_shape(heads: int, kv_heads: int, dim: int, **more: int) -> KernelShape:
    values = {"block_size": 16, "itemsize": 2, "max_context": 1 << 17} | more
    return KernelShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, **values)


def test_tiles_of_the_usual_models() -> None:
    llama = kernel_shape(32, 8, 128)
    assert llama.short == TileShape(block_m=16, block_n=64, num_warps=8, num_stages=3)
    many = kernel_shape(32, 8, 128, num_seqs=5)
    assert many.short == TileShape(block_m=16, block_n=64, num_warps=4, num_stages=3)
    assert (llama.programs_per_processor, many.programs_per_processor) == (1, 2)
    assert llama.long == TileShape(block_m=128, block_n=64, num_warps=8, num_stages=3)
    assert (llama.max_short_query, llama.max_partitions) == (4, 16)
    # Without a next kernel that starts early, few sequences have all registers.
    assert [llama.max_registers(0, early=early) for early in (True, False)] == [168, 0]
    assert [many.max_registers(0, early=early) for early in (True, False)] == [255, 255]
    gpt2 = kernel_shape(12, 12, 64)
    assert (gpt2.max_short_query, gpt2.max_partitions) == (16, 16)
    falcon = kernel_shape(71, 1, 64)
    assert falcon.short.block_m == 128
    assert (falcon.max_short_query, falcon.max_partitions) == (1, 64)


def test_tiles_shrink_with_shared_memory() -> None:
    assert kernel_shape(32, 8, 128, shared_memory=99 * 1024).long.num_stages == 2
    assert kernel_shape(32, 8, 256, shared_memory=99 * 1024).long.block_m == 64


def test_workspace_is_what_a_step_needs_at_most() -> None:
    llama = kernel_shape(32, 8, 128, num_seqs=64)
    # 16 sequences of 4 tokens: 64 rows, 32 heads, 8 partitions, 128 values and 1 sum. A decode step
    # of 64 sequences has 4 partitions.
    assert llama.workspace_bytes(64) == 64 * 32 * 8 * 129 * 4
    # In a mixed step only sequences with at most 4 rows need it.
    assert llama.workspace_bytes(2048) == 4 * 64 * 32 * 4 * 129 * 4
    # 4 sequences have 16 partitions each, which is more than 5 sequences with 8.
    assert kernel_shape(32, 8, 128, num_seqs=5).workspace_bytes(2048) == 4 * 4 * 32 * 16 * 129 * 4
    # A context that fits one partition needs none.
    assert kernel_shape(32, 8, 128, max_context=128, num_seqs=64).workspace_bytes(64) == 0


def test_more_sequences_have_fewer_partitions() -> None:
    found = {
        count: (shape.min_partition, shape.max_partitions)
        for count in (1, 4, 5, 16, 17, 64, 65, 256)
        for shape in (kernel_shape(32, 8, 128, num_seqs=count),)
    }
    assert found[1] == found[4] == (128, 16)
    assert found[5] == found[16] == (512, 8)
    assert found[17] == found[64] == (1024, 4)
    assert found[65] == found[256] == (2048, 4)
