"""The flashinfer backend without a GPU: lists of pages, planning over stand-ins, signatures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.buckets import GraphKey
from ostinato.ops.attention import AttentionSpec, PlannedTable
from ostinato.ops.backends.flashinfer_plan import PageArrays, fill_pages
from ostinato.ops.flashinfer_library import Library, load_library
from tests.ops.attention_steps import Shape
from tests.ops.attention_steps import run as run_step
from tests.ops.flashinfer_stand_in import RECORDED, bound_to, recorded_library
from tests.ops.planned_steps import Engine

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")


PAGES = PlannedTable(block_size=16, max_blocks=3)


class Host(NamedTuple):
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    window_block_table: np.ndarray | None = None


def page_arrays(num_slots: int, num_indices: int) -> PageArrays:
    sizes = (num_slots + 1, num_slots, num_slots + 1, num_indices)
    return PageArrays(*(np.full(size, -7, dtype=np.int32) for size in sizes))


def test_pages_of_a_step() -> None:
    host = Host(
        np.array([0, 1, 1, 4, 9999], dtype=np.int32),
        np.array([17, 0, 32, 9999], dtype=np.int32),
        np.array([[5, 3, 8], [0, 0, 0], [2, 4, 8], [6, 6, 6]], dtype=np.int32),
    )
    arrays = page_arrays(4, 8)
    assert fill_pages(arrays, GraphKey(6, 3, 0), host, host.block_table, PAGES) == 4
    assert arrays.kv_indptr.tolist() == [0, 2, 4, 4, 4]
    assert arrays.last_page_len.tolist() == [1, 16, 0, 0]
    assert arrays.query_indptr.tolist() == [0, 1, 4, 4, 6]
    assert arrays.indices.tolist() == [5, 3, 2, 4, -7, -7, -7, -7]


def test_pages_of_padding_alone() -> None:
    host = Host(np.zeros(3, np.int32), np.zeros(2, np.int32), np.zeros((2, 3), np.int32))
    arrays = page_arrays(2, 3)
    assert fill_pages(arrays, GraphKey(2, 2, 1), host, host.block_table, PAGES) == 0
    assert arrays.kv_indptr.tolist() == [0, 0, 0]
    assert arrays.last_page_len.tolist() == [0, 0]
    assert arrays.query_indptr.tolist() == [0, 0, 2]


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=6),
    padding=st.integers(0, 3),
    block_size=st.sampled_from([8, 16]),
    window=st.sampled_from([0, 1, 13, 40]),
)
def test_pages_cover_every_sequence(
    rows: list[tuple[int, int]], padding: int, block_size: int, window: int
) -> None:
    lengths = [(query, query + before if query else 0) for query, before in rows]
    starts = np.cumsum([0, *(query for query, _ in lengths)]).astype(np.int32)
    table = np.arange(len(rows) * 8, dtype=np.int32).reshape(len(rows), 8)
    host = Host(starts, np.array([length for _, length in lengths], dtype=np.int32), table)
    arrays = page_arrays(len(rows) + 1, table.size)
    key = GraphKey(int(starts[-1]) + padding, len(rows), 0)
    used = fill_pages(arrays, key, host, table, PlannedTable(block_size, 8, window))
    present = [(row, *pair) for row, pair in enumerate(lengths) if pair[0]]
    num_pages = 0
    for slot, (row, query_len, length) in enumerate(present):
        seen = max(0, length - query_len + 1 - window) if window else 0  # by the first row
        skipped = seen // block_size
        pages = arrays.indices[arrays.kv_indptr[slot] : arrays.kv_indptr[slot + 1]].tolist()
        assert pages == table[row, skipped : -(-length // block_size)].tolist()
        counted = (skipped + len(pages) - 1) * block_size + arrays.last_page_len[slot]
        assert counted == length
        num_pages += len(pages)
        assert arrays.query_indptr[slot] == starts[row]
        assert arrays.query_indptr[slot + 1] - starts[row] >= query_len
    absent = slice(len(present), None)
    assert set(np.diff(arrays.kv_indptr)[absent].tolist()) <= {0}
    assert set(arrays.last_page_len[absent].tolist()) <= {0}
    assert np.diff(arrays.query_indptr).tolist() == [
        *(query_len for _, query_len, _ in present),
        *[0] * (len(rows) - len(present)),
        padding,
    ]
    assert used == num_pages


def spec(**more: object) -> AttentionSpec:
    values = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "block_size": 16,
        "dtype": torch.float16,
        "device": torch.device("cpu"),
    }
    return AttentionSpec(**(values | more))  # pyright: ignore[reportArgumentType]


def test_why_unsupported() -> None:
    from ostinato.ops.backends.flashinfer import BACKEND, why_shape_unsupported

    assert BACKEND.why_unsupported(spec()) == "needs a CUDA device, but the model is on cpu"
    assert why_shape_unsupported(spec()) is None
    reason = why_shape_unsupported(spec(has_cross=True))
    assert reason == "computes no cross attention; graphs.attention=triton does"
    cuda = torch.device("cuda")
    assert BACKEND.why_unsupported(spec(device=cuda, dtype=torch.float32)) == (
        "needs float16 or bfloat16, but the model has torch.float32"
    )
    assert why_shape_unsupported(spec(has_sinks=True)) == (
        "has no attention sinks, which the model needs; graphs.attention=triton serves that"
    )
    assert why_shape_unsupported(spec(sliding_window=-64)) == (
        "has no chunks of the context, which the model needs; graphs.attention=triton serves that"
    )
    assert why_shape_unsupported(spec(has_alibi=True)) == (
        "has no ALiBi slopes, which the model needs; graphs.attention=triton serves that"
    )
    assert why_shape_unsupported(spec(head_dim=80)) == (
        "needs a head size in (64, 128, 256), but the model has 80"
    )


@pytest.fixture
def flashinfer() -> Library:
    try:
        return load_library()
    except ImportError as error:
        pytest.skip(f"flashinfer is an optional dependency and cannot be imported: {error}")


@pytest.mark.parametrize("version", ["installed", *RECORDED])
def test_every_call_binds_to_flashinfer(
    version: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode, mixed and uncaptured steps are planned and run. Each call must bind to FlashInfer's
    signature. The kernel that writes keys and values is left out.
    """
    if version == "installed":
        flashinfer = request.getfixturevalue("flashinfer")
    else:
        flashinfer = recorded_library(version)
    from ostinato.ops.backends import flashinfer as module

    monkeypatch.setattr(module, "write_kv", lambda *arguments: None)
    calls: list[str] = []
    backend = module.FlashInferBackend(bound_to(flashinfer, calls))
    keys = [GraphKey(4, 4, 1), GraphKey(16, 4, 0)]
    planner = backend.make_planner(spec(), keys, tables=[PlannedTable(16, 12)])
    shape = Shape(head_dim=64, dtype=torch.float16)
    engine = Engine(shape, max_num_tokens=32, max_num_seqs=4, max_blocks=12)
    for key in [*keys, *keys, GraphKey(5, 2, 0)]:
        step = engine.load([(1, 30), (1, 40)], key)
        planner.plan(key, engine.buffers.host, engine.buffers.plan)
        # The slots that are not written here hold NaN.
        clean = step._replace(k_cache=step.k_cache.nan_to_num(), v_cache=step.v_cache.nan_to_num())
        run_step(backend, clean, shape)
    planner.close()
    assert sorted(set(calls)) == [
        "DecodeStandIn.__init__",
        "DecodeStandIn.plan",
        "DecodeStandIn.reset_workspace_buffer",
        "DecodeStandIn.run",
        "DecodeStandIn.workspace_size",
        "PrefillStandIn.__init__",
        "PrefillStandIn.plan",
        "PrefillStandIn.reset_workspace_buffer",
        "PrefillStandIn.run",
        "PrefillStandIn.workspace_size",
        "fast_decode_plan",
    ]
