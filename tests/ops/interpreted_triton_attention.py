"""The triton backend against the reference, under Triton's interpreter.

The interpreter must be chosen before a kernel is decorated. So this file has a name that pytest
does not collect. test_interpreted_kernels.py runs it in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from ostinato.ops.attention import AttentionMetadata
from ostinato.ops.backends import triton_tiles
from ostinato.ops.backends.reference import BACKEND as REFERENCE
from ostinato.ops.backends.triton import BACKEND, write_kv
from tests.ops.attention_steps import Shape, Step, check, make_step, run
from tests.ops.cross_problems import check_cross, cross_problem
from tests.ops.exact_fp8 import FP8, convert_exactly
from tests.ops.widened_bfloat16 import widen_products_of_bfloat16

FLOAT32, FLOAT16 = torch.float32, torch.float16
PARTITIONS = triton_tiles._PARTITIONS
PARTITION = 128  # tokens

# Decode, chunked prefill, whole prefill, the shortest sequence, absent rows: all in one step.
MIXED = [(1, 270), (37, 37), (4, 150), (20, 90), (1, 1), (5, 5)]
SHORT = [(1, 100), (13, 40), (2, 2), (9, 64)]  # at most 128 tokens: one partition


def shape(
    heads: int, kv_heads: int, dim: int, size: int, dtype: torch.dtype, **more: float
) -> Shape:
    return Shape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        value_dim=int(more.get("value", 0)),
        block_size=size,
        dtype=dtype,
        sliding_window=int(more.get("window", 0)),
        soft_cap=more.get("cap", 0.0),
        has_alibi=bool(more.get("alibi", False)),
        has_sinks=bool(more.get("sinks", False)),
        run_tokens=int(more.get("run", 0)),
        num_rows=9,
        num_padding=3,
    )


# Every value of every axis, and the pairs that share code: head layout x type, block x tile width,
# window x partitions, cap x window. The interpreter's time grows with the number of KV heads, so
# most cases have one.
GRID = [
    pytest.param(MIXED, shape(8, 2, 64, 16, FLOAT32), marks=pytest.mark.slow),
    (MIXED, shape(4, 1, 64, 16, FLOAT16)),
    (MIXED, shape(4, 1, 64, 16, FLOAT32, window=100)),
    (MIXED, shape(8, 2, 64, 16, FLOAT16, window=150, cap=5.0)),
    pytest.param(MIXED, shape(2, 2, 32, 8, FLOAT32), marks=pytest.mark.slow),
    (MIXED, shape(1, 1, 32, 128, FLOAT16, window=17)),
    pytest.param(MIXED, shape(3, 1, 80, 64, FLOAT32, cap=30.0), marks=pytest.mark.slow),
    pytest.param(MIXED, shape(7, 1, 96, 32, FLOAT16), marks=pytest.mark.slow),
    pytest.param(MIXED, shape(5, 1, 16, 128, FLOAT32, window=1), marks=pytest.mark.slow),
    (SHORT, shape(4, 2, 128, 64, FLOAT16)),
    (SHORT, shape(4, 1, 128, 8, FLOAT32, window=33)),
    pytest.param(MIXED, shape(4, 1, 64, 16, FLOAT32, window=-100), marks=pytest.mark.slow),
    (MIXED, shape(2, 1, 48, 16, FLOAT32, value=32)),
    (SHORT, shape(2, 1, 24, 16, FLOAT16, value=80)),
    (SHORT, shape(3, 3, 96, 16, FLOAT16, value=64, window=20)),
    (SHORT, shape(8, 2, 64, 16, FLOAT16, window=-300, cap=5.0)),
    (SHORT, shape(2, 2, 256, 16, FLOAT32, cap=2.0)),
    (SHORT, shape(2, 1, 256, 32, FLOAT16)),
    (SHORT, shape(24, 1, 32, 16, FLOAT16)),
    (SHORT, shape(16, 1, 32, 16, FLOAT32)),
    (MIXED, shape(3, 1, 32, 16, FLOAT32, alibi=True)),
    (MIXED, shape(3, 1, 64, 16, FLOAT16, sinks=True, window=100)),
    (SHORT, shape(4, 2, 32, 16, FLOAT32, sinks=True, alibi=True, cap=5.0)),
    (MIXED, shape(2, 1, 32, 16, FLOAT32, run=11)),
    (MIXED, shape(2, 1, 32, 16, FLOAT16, run=30, window=40)),
    # Layers that share blocks with others can have blocks of any multiple of cache.block_size.
    (MIXED, shape(2, 1, 32, 96, FLOAT32)),
    (MIXED, shape(2, 1, 64, 48, FLOAT16, window=40)),
]


def label(value: object) -> str | None:
    if isinstance(value, Shape):
        return (
            f"{str(value.dtype)[6:]}-{value.num_heads}x{value.num_kv_heads}-d{value.head_dim}"
            f"-v{value.value_dim}-b{value.block_size}-w{value.sliding_window}-c{value.soft_cap}"
            + "-alibi" * value.has_alibi
            + "-sinks" * value.has_sinks
            + f"-run{value.run_tokens}" * bool(value.run_tokens)
        )
    return "split" if value is MIXED else "whole"


@pytest.fixture(autouse=True)
def short_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide contexts as in a step of few sequences, because long contexts take seconds here."""
    monkeypatch.setattr(triton_tiles, "_PARTITIONS", ((1 << 30, PARTITION, 1),))


@pytest.mark.parametrize(("lengths", "shape"), GRID, ids=label)
def test_matches_reference(lengths: list[tuple[int, int]], shape: Shape) -> None:
    out = check(BACKEND, lengths, shape)
    assert (out[-3:] == 0).all(), "padding rows must be zeros"


def test_partitions_of_many_heads_are_joined_some_columns_at_a_time() -> None:
    check(BACKEND, [(1, 270)], shape(128, 1, 96, 16, FLOAT16, sinks=True))


FP8_GRID = [
    (MIXED, shape(4, 1, 64, 16, FLOAT16)),
    (SHORT, shape(2, 2, 32, 8, FLOAT32)),
    (SHORT, shape(2, 1, 80, 64, FLOAT16, window=33, cap=5.0)),
]


@pytest.fixture
def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert to 8 bits as torch and the hardware do, which the interpreter does not."""
    convert = convert_exactly(interpreter._convert_float)
    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize(("lengths", "shape"), FP8_GRID, ids=label)
def test_a_cache_of_eight_bits(lengths: list[tuple[int, int]], shape: Shape) -> None:
    """Compares outputs over the same rounded cache, and the bytes that are written to it."""
    check(BACKEND, lengths, replace(shape, cache_dtype=FP8))


@pytest.mark.usefixtures("exact_fp8")
def test_eight_bits_saturate() -> None:
    case = Shape(num_heads=2, num_kv_heads=1, head_dim=16, cache_dtype=FP8)
    step = make_step([(3, 3)], case)
    step.k[0], step.k[1], step.v[2] = 1e4, -449.0, 463.9
    _, k_cache, v_cache = run(BACKEND, step, case)
    block = int(step.metadata.block_table[0, 0])
    assert k_cache[block, 0, :2, 0].float().tolist() == [448.0, -448.0]
    assert v_cache[block, 0, 2, 0].float().item() == 448.0


def test_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would multiply bfloat16's raw 16-bit integers, so operands are widened."""
    widen_products_of_bfloat16(monkeypatch)
    check(BACKEND, MIXED, shape(4, 1, 64, 16, torch.bfloat16))


@pytest.mark.parametrize("dtype", [FLOAT32, pytest.param(FLOAT16, marks=pytest.mark.slow)], ids=str)
def test_cross_attention(dtype: torch.dtype) -> None:
    problem = cross_problem(
        num_rows=5, lengths=[1, 16, 150, 270], heads=(4, 2), dtype=dtype, cache_dtype=dtype
    )
    check_cross(BACKEND.run_cross, write_kv_of_backend, problem)


def write_kv_of_backend(*arguments: torch.Tensor) -> None:
    k, v, k_cache, v_cache, slots = arguments
    one = torch.zeros(1, dtype=torch.int32)
    metadata = AttentionMetadata(
        torch.zeros(2, dtype=torch.int32), one, one[None], slots, torch.ones(1, dtype=torch.int64)
    )
    write_kv(torch.empty_like(k), k, v, k_cache, v_cache, metadata)


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 24), st.integers(0, 160)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=5,
    ),
    group=st.integers(1, 5),
    size=st.sampled_from([8, 16, 64]),
    window=st.sampled_from([0, 0, 5, 100, -7, -100]),
)
def test_any_mix_of_lengths(
    lengths: list[tuple[int, int]], group: int, size: int, window: int
) -> None:
    check(BACKEND, lengths, shape(group, 1, 16, size, FLOAT32, window=window))


def test_more_rows_than_one_chunk_of_the_work_list() -> None:
    """The kernel reads 256 rows at a time; absent rows can be anywhere among them."""
    absent = (0, 0)
    lengths = [
        (1, 3),
        absent,
        (2, 150),
        *[absent] * 250,
        (19, 30),
        (1, 2),
        (1, 9),
        (1, 300),
        absent,
    ]
    lengths += [(2, 145), (30, 50)]
    assert len(lengths) == 260
    check(BACKEND, lengths, Shape(num_heads=2, num_kv_heads=1, head_dim=16))


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_partitions_of_each_number_of_sequences(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most sequences for one length of partitions, and the fewest for the next longer one."""
    monkeypatch.setattr(triton_tiles, "_PARTITIONS", PARTITIONS)
    (most, least, _), (_, longer, _) = PARTITIONS[index : index + 2]
    for num_seqs, shortest in ((most, least), (most + 1, longer)):
        lengths = [(2, shortest + 20), *[(0, 0)] * (num_seqs - 2), (1, 2 * shortest + 70)]
        case = Shape(num_heads=2, num_kv_heads=1, head_dim=16, num_rows=num_seqs)
        check(BACKEND, lengths, case)


def alone(step: Step, row: int) -> Step:
    """The same sequence in a step of its own, over the same cache."""
    begin, end = step.metadata.query_start_loc[row : row + 2].tolist()
    return Step(
        step.q[begin:end],
        step.k[begin:end],
        step.v[begin:end],
        step.k_cache,
        step.v_cache,
        AttentionMetadata(
            torch.tensor([0, end - begin], dtype=torch.int32),
            step.metadata.seq_lens[row : row + 1],
            step.metadata.block_table[row : row + 1],
            step.metadata.slot_mapping[begin:end],
            step.metadata.plan,
        ),
        end - begin,
    )


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch() -> None:
    case = shape(2, 1, 32, 16, FLOAT16, alibi=True, sinks=True)
    step = make_step(MIXED, case)
    together, _, _ = run(BACKEND, step, case)
    starts = step.metadata.query_start_loc.tolist()
    for row in range(len(MIXED)):
        by_itself, _, _ = run(BACKEND, alone(step, row), case)
        assert torch.equal(by_itself, together[starts[row] : starts[row + 1]]), MIXED[row]


def test_partitions_change_only_the_order_of_sums() -> None:
    lengths = [(1, 125), (3, 99)]
    case = Shape(num_heads=8, num_kv_heads=2, head_dim=32)
    whole, _, _ = run(BACKEND, make_step(lengths, case), case)  # B = 8: one partition at most
    wide = make_step(lengths, Shape(num_heads=8, num_kv_heads=2, head_dim=32, max_blocks=64))
    allowed, _, _ = run(BACKEND, wide, case)  # several are allowed, 128 tokens need only one
    torch.testing.assert_close(whole, allowed, atol=1e-6, rtol=1e-6)


def test_the_uniform_decode_hint_saves_a_launch_and_changes_nothing() -> None:
    lengths = [(1, 150), (1, 40), (1, 17), (1, 1), (1, 90), (1, 64)]
    case = shape(2, 1, 16, 16, FLOAT32)
    step = make_step(lengths, case)
    without, _, _ = run(BACKEND, step, case)
    step.metadata.plan[0] = 1
    hinted, _, _ = run(BACKEND, step, case)
    assert torch.equal(without, hinted)


def test_views_of_a_fused_projection() -> None:
    case = shape(4, 2, 32, 16, FLOAT32)
    step = make_step(SHORT, case)
    fused = torch.cat([tensor.flatten(1) for tensor in step[:3]], 1)
    q, k, v = (part.unflatten(1, (-1, 32)) for part in fused.split([128, 64, 64], 1))
    assert not q.is_contiguous()
    expected = run(BACKEND, step, case)
    actual = run(BACKEND, step._replace(q=q, k=k, v=v), case)
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_a_cache_of_more_than_2_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 32 bits would wrap around. Only the pages of the last blocks become memory."""
    case = shape(2, 1, 64, 128, FLOAT16)
    step = make_step([(1, 40), (9, 12)], case)
    expected = run(BACKEND, step, case)
    # The interpreter copies every storage back, which is the same memory here.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)
    first = (1 << 31) // step.k_cache[0].numel()
    metadata = step.metadata._replace(
        block_table=step.metadata.block_table + first,
        slot_mapping=step.metadata.slot_mapping + first * 128,
    )
    projected = torch.cat([tensor.flatten(1) for tensor in step[:3]], 1)
    none = (None, None)
    for is_projected in (False, True):
        caches = []
        for small in (step.k_cache, step.v_cache):
            large = torch.empty((first + len(small), *small.shape[1:]), dtype=small.dtype)
            large[first:] = small
            caches.append(large)
        rest = (*caches, metadata, 64**-0.5, 0, 0.0, *none)
        if is_projected:
            out = BACKEND.run_projected(projected, *none, *none, 0.0, 2, *rest)
        else:
            out = BACKEND.run(*step[:3], *rest)
        for one, other in zip(expected, (out, *(each[first:] for each in caches)), strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_blocks_shared_within_a_step() -> None:
    """A sequence reads a block that another sequence of the same step fills."""
    case = Shape(num_heads=2, num_kv_heads=1, head_dim=16)
    step = make_step([(20, 20), (4, 24)], case)
    step.metadata.block_table[1, 0] = step.metadata.block_table[0, 0]
    expected, _, _ = run(REFERENCE, step, case)
    out, _, _ = run(BACKEND, step, case)
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=5e-6)


def test_write_keeps_every_bit_of_bfloat16() -> None:
    case = shape(4, 2, 80, 8, torch.bfloat16)
    step = make_step(SHORT, case)
    out = torch.full(step.q.shape, float("nan"), dtype=torch.bfloat16)
    write_kv(out, step.k, step.v, step.k_cache, step.v_cache, step.metadata)
    slots = step.metadata.slot_mapping[: step.num_tokens]
    for cache, tensor in ((step.k_cache, step.k), (step.v_cache, step.v)):
        stored = cache.transpose(1, 2).flatten(0, 1)[slots]
        assert torch.equal(stored, tensor[: step.num_tokens])
    assert out[: step.num_tokens].isnan().all(), "write_kv must not write rows of sequences"
    assert (out[step.num_tokens :] == 0).all()


def test_an_empty_step() -> None:
    case = Shape()
    step = make_step([(1, 1)], case)
    empty = step._replace(q=step.q[:0], k=step.k[:0], v=step.v[:0])
    out, _, _ = run(BACKEND, empty, case)
    assert out.shape == (0, 8, 32)


def test_a_cache_that_is_a_view_is_refused() -> None:
    case = Shape()
    step = make_step([(1, 1)], case)
    view = step.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"k_cache .* must be contiguous; allocate it as its own"):
        BACKEND.run(
            step.q, step.k, step.v, view, step.v_cache, step.metadata, 1.0, 0, 0.0, None, None
        )
