"""Attention on the CPU.

The reference backend is compared with dense attention, and the C++ kernel with the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.backends.cpu import BACKEND as CPU
from ostinato.ops.backends.reference import BACKEND as REFERENCE
from tests.ops.attention_steps import Shape, Step, check, make_step, run
from tests.ops.kernel_checks import EACH_LEVEL
from tests.ops.level_backend import LevelBackend
from tests.pairwise import pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = ((4, 4), (8, 4), (8, 2), (8, 1), (7, 1))
HEAD_DIMS = (16, 32, 64, 72, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
MIXED = [(1, 1), (1, 300), (70, 70), (1, 64), (33, 290), (2, 257)]


@pytest.fixture(scope="module", params=EACH_LEVEL)
def level(request: pytest.FixtureRequest) -> LevelBackend:
    return LevelBackend(request.param)


@pytest.fixture(autouse=True)
def _one_thread(set_threads: Callable[[int], None]) -> None:
    """Tests use one thread by default: small steps do not gain from a second."""
    set_threads(1)


def test_pairwise_covers_every_pair() -> None:
    chosen = pairwise((1, 2, 3), ("a", "b"), (True, False))
    assert {(a, b) for a, b, _ in chosen} == set(itertools.product((1, 2, 3), ("a", "b")))
    assert {(a, c) for a, _, c in chosen} == set(itertools.product((1, 2, 3), (True, False)))
    assert {(b, c) for _, b, c in chosen} == set(itertools.product(("a", "b"), (True, False)))
    assert len(chosen) == 6


# ---- the reference itself ----------------------------------------------------------------------


def dense(step: Step, shape: Shape, row: int) -> Tensor:
    """One sequence's output through torch's own attention over gathered, contiguous keys."""
    starts = step.metadata.query_start_loc.tolist()
    length = int(step.metadata.seq_lens[row])
    num_queries = starts[row + 1] - starts[row]
    positions = range(length)
    blocks = [int(step.metadata.block_table[row, p // shape.block_size]) for p in positions]
    offsets = [p % shape.block_size for p in positions]
    # Blocks outside of the window hold NaN, which a mask does not hide.
    keys, values = (
        cache[blocks, :, offsets].nan_to_num() for cache in (step.k_cache, step.v_cache)
    )
    keys[length - num_queries :] = step.k[starts[row] : starts[row + 1]]
    values[length - num_queries :] = step.v[starts[row] : starts[row + 1]]
    key = torch.arange(length)
    query = torch.arange(length - num_queries, length)[:, None]
    last = query
    if step.metadata.visible_ends is not None:
        last = last.maximum(step.metadata.visible_ends[starts[row] : starts[row + 1], None] - 1)
    seen = key <= last
    if shape.sliding_window > 0:
        seen &= key > query - shape.sliding_window
    elif shape.sliding_window < 0:
        seen &= key >= query - query % -shape.sliding_window
    slopes, sinks = shape.per_head()
    added = torch.zeros(shape.num_heads, 1, length)
    if slopes is not None:
        # ALiBi adds slope * (key - query). The query's part is one number a row, so it changes no
        # weight.
        added = added + slopes[:, None, None] * key
    added = added.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        # A key of zeros, whose logit is the sink and whose value is zero.
        keys, values = (
            torch.cat((side, torch.zeros(1, *side.shape[1:]))) for side in (keys, values)
        )
        added = torch.cat((added, sinks[:, None, None].expand(-1, num_queries, 1)), -1)
    out = F.scaled_dot_product_attention(
        step.q[starts[row] : starts[row + 1]].transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=added,
        enable_gqa=True,
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize(
    "extras",
    [{}, {"has_alibi": True}, {"has_sinks": True}, {"value_dim": 24}, {"run_tokens": 6}],
    ids=str,
)
@pytest.mark.parametrize("window", [0, 1, 19, -19])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_reference_is_dense_attention(
    num_heads: int, num_kv_heads: int, window: int, extras: dict[str, Any]
) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, sliding_window=window, **extras)
    lengths = [(1, 40), (20, 20), (7, 33)]
    step = make_step(lengths, shape)
    out, _, _ = run(REFERENCE, step, shape)
    expected = torch.cat([dense(step, shape, row) for row in range(len(lengths))])
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_reference_soft_cap() -> None:
    # One head, two keys: the logits 8 and 0 become 2 tanh(4) and 0.
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=8, block_size=8, soft_cap=2.0)
    step = make_step([(2, 2)], shape)
    step.q[:] = 0.0
    step.k[:] = 0.0
    step.q[1, 0, 0], step.k[1, 0, 0] = 8.0, 8.0**0.5
    out, _, _ = run(REFERENCE, step, shape)
    weight = torch.sigmoid(2.0 * torch.tanh(torch.tensor(4.0)))
    torch.testing.assert_close(out[1, 0], step.v[0, 0] * (1 - weight) + step.v[1, 0] * weight)


# ---- the C++ kernel ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "block_size"), pairwise(DTYPES, HEADS, HEAD_DIMS, BLOCK_SIZES)
)
def test_layouts(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    shape = Shape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    check(CPU, MIXED, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(1, 0.0), (37, 0.0), (256, 0.0), (-37, 0.0), (0, 5.0), (20, 3.0)]
)
def test_window_and_soft_cap(dtype: torch.dtype, window: int, soft_cap: float) -> None:
    check(CPU, MIXED, Shape(dtype=dtype, sliding_window=window, soft_cap=soft_cap))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "extras", [{"has_alibi": True}, {"has_sinks": True}, {"run_tokens": 23}], ids=str
)
def test_per_head_options_and_rows_that_see_later_tokens(
    level: LevelBackend, dtype: torch.dtype, extras: dict[str, Any]
) -> None:
    check(level, MIXED, Shape(dtype=dtype, **extras))
    check(
        level, MIXED, Shape(dtype=dtype, num_heads=7, num_kv_heads=1, sliding_window=90, **extras)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (192, 128), (40, 72)])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=["plain", "int8"])
def test_keys_and_values_of_two_sizes(
    level: LevelBackend,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    cache_dtype: torch.dtype | None,
) -> None:
    """Multi-head latent attention (DeepSeek) has keys of 192 and values of 128 elements."""
    shape = Shape(
        head_dim=head_dim,
        value_dim=value_dim,
        num_heads=3,
        num_kv_heads=3,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    check(level, MIXED, shape)


def test_values_of_another_size_have_the_bits_of_padded_ones() -> None:
    """The result is that of values padded with zeros to the size of keys, without the padding."""
    shape = Shape(head_dim=48, value_dim=32, dtype=torch.bfloat16)
    step = make_step(MIXED, shape)
    padded = step._replace(v=F.pad(step.v, (0, 16)), v_cache=F.pad(step.v_cache, (0, 16)))
    out, _, _ = run(CPU, step, shape)
    assert torch.equal(out, run(CPU, padded, shape)[0][..., :32])


def test_a_sink_far_above_all_logits_takes_all_weight() -> None:
    shape = Shape()
    step = make_step(MIXED, shape)
    sinks = torch.full((shape.num_heads,), 200.0)
    # The backends read the cache in different orders. So NaN in places that one does not see would
    # be seen by the other.
    caches = (cache.nan_to_num() for cache in (step.k_cache, step.v_cache))
    scale = shape.head_dim**-0.5
    arguments = (step.q, step.k, step.v, *caches, step.metadata, scale, 0, 0.0, None)
    for backend in (CPU, REFERENCE):
        out = backend.run(*arguments, sinks)
        assert torch.equal(out, torch.zeros_like(out))
        torch.testing.assert_close(backend.run(*arguments, -sinks), backend.run(*arguments, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "window"), [(32, 0), (72, 45), (128, 0)])
def test_every_instruction_set_level(
    level: LevelBackend, dtype: torch.dtype, head_dim: int, window: int
) -> None:
    shape = Shape(head_dim=head_dim, dtype=dtype, sliding_window=window, num_heads=6)
    check(level, MIXED, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "more",
    [
        {"head_dim": 32, "num_heads": 6},
        {"head_dim": 72, "block_size": 8, "sliding_window": 45},
        {"head_dim": 128, "block_size": 64, "has_alibi": True, "has_sinks": True},
        {"head_dim": 64, "soft_cap": 5.0, "num_heads": 7, "num_kv_heads": 1, "run_tokens": 70},
    ],
    ids=str,
)
def test_a_cache_of_eight_bits(
    level: LevelBackend, dtype: torch.dtype, more: dict[str, Any]
) -> None:
    """The cache equals the reference's bit for bit. Outputs are compared over the same numbers."""
    check(level, MIXED, Shape(dtype=dtype, cache_dtype=torch.int8, **more))


def test_tiny_and_zero_rows_in_eight_bits(level: LevelBackend) -> None:
    shape = Shape(cache_dtype=torch.int8)
    step = make_step([(4, 40)], shape)
    for exponent, row in zip((-140, -145, -120), step.k, strict=False):
        row *= 2.0**exponent
    step.v[1] = 0.0
    _, k_cache, v_cache = run(level, step, shape)
    _, k_expected, v_expected = run(REFERENCE, step, shape)
    assert torch.equal(k_cache[1:], k_expected[1:])
    assert torch.equal(v_cache[1:], v_expected[1:])


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_split_contexts(
    set_threads: Callable[[int], None], dtype: torch.dtype, num_threads: int
) -> None:
    shape = Shape(num_heads=4, num_kv_heads=1, head_dim=64, dtype=dtype)
    lengths = [(1, 3000), (40, 1500), (1, 5)]
    set_threads(1)
    alone = check(CPU, lengths, shape)
    set_threads(num_threads)
    assert torch.equal(check(CPU, lengths, shape), alone)


def test_many_heads_share_one_kv_head() -> None:
    check(CPU, [(3, 80), (1, 300)], Shape(num_heads=160, num_kv_heads=1, dtype=torch.bfloat16))


def test_padding_gives_zeros() -> None:
    shape = Shape(num_rows=7, num_padding=5, max_blocks=40, dtype=torch.bfloat16)
    step = make_step([(1, 40), (20, 20)], shape)
    out, _, _ = run(CPU, step, shape)
    assert torch.equal(out[21:], torch.zeros_like(out[21:]))
    check(CPU, [(1, 40), (20, 20)], shape)


def test_absent_rows_between_others() -> None:
    check(CPU, [(0, 0), (1, 40), (0, 0), (20, 20), (0, 0)], Shape())


def test_a_step_of_padding_alone() -> None:
    shape = Shape(num_rows=3, num_padding=4)
    step = make_step([(0, 0)], replace(shape, max_blocks=2))
    out, _, _ = run(CPU, step, shape)
    assert torch.equal(out, torch.zeros_like(step.q))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_read_blocks_that_others_write_in_the_same_step(dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    step = make_step([(32, 32), (9, 41)], shape)
    step.metadata.block_table[1, :2] = step.metadata.block_table[0, :2]
    out, k_cache, _ = run(CPU, step, shape)
    expected, k_expected, _ = run(REFERENCE, step, shape)
    torch.testing.assert_close(
        out, expected, atol=3e-2 if dtype != torch.float32 else 1e-5, rtol=1e-2
    )
    assert torch.equal(k_cache.nan_to_num(7.0), k_expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_a_fused_row(dtype: torch.dtype) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, dtype=dtype)
    step = make_step(MIXED, shape)
    fused = torch.cat([x.flatten(1) for x in (step.q, step.k, step.v)], dim=1)
    q, k, v = (x.unflatten(1, (-1, 32)) for x in fused.split([6 * 32, 2 * 32, 2 * 32], dim=1))
    assert not k.is_contiguous()
    out, k_cache, v_cache = run(CPU, step._replace(q=q, k=k, v=v), shape)
    expected = run(CPU, step, shape)
    assert out.is_contiguous()
    assert torch.equal(out, expected[0])
    assert torch.equal(k_cache.nan_to_num(7.0), expected[1].nan_to_num(7.0))
    assert torch.equal(v_cache.nan_to_num(7.0), expected[2].nan_to_num(7.0))


# ---- any batch ---------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Shape]:
    num_kv_heads = draw(st.integers(1, 3))
    shape = Shape(
        num_heads=num_kv_heads * draw(st.integers(1, 9)),
        num_kv_heads=num_kv_heads,
        head_dim=8 * draw(st.integers(1, 18)),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        dtype=draw(st.sampled_from(DTYPES)),
        sliding_window=draw(st.sampled_from((0, 0, 1, 16, 65, -1, -24, -100))),
        soft_cap=draw(st.sampled_from((0.0, 0.0, 2.5))),
        has_alibi=draw(st.booleans()),
        has_sinks=draw(st.booleans()),
        run_tokens=draw(st.sampled_from((0, 1, 7, 30, 90))),
        num_padding=draw(st.integers(0, 3)),
    )
    lengths = []
    for _ in range(draw(st.integers(1, 5))):
        context = draw(st.integers(1, 200))
        lengths.append((draw(st.integers(1, min(context, 40))), context))
    return lengths, shape


@settings(max_examples=60, deadline=None)
@given(steps())
def test_any_batch(drawn: tuple[list[tuple[int, int]], Shape]) -> None:
    check(CPU, *drawn)
