"""The packed linear ops against float64, on every instruction set that this processor runs.

Tolerance: a float32 sum of n products is within n * 2**-24 * sum(|x * w|) of the exact one (Higham,
"Accuracy and Stability of Numerical Algorithms", section 3.1). Products of bfloat16 are exact in
float32. Rounding to bfloat16 adds 2**-8 of the result. Everything else is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from ostinato.ops.linear.packed_linear import (
    _pack_reference,
    pack_linear_weight,
    packed_linear,
    packed_linear_reference,
    packed_rows,
    unpack_linear_weight,
    why_unpackable,
    zero_padding,
)
from tests.ops.kernel_checks import (
    EACH_LEVEL,
    assert_within,
    linear_problem,
    name_of,
    ops_of,
    packed_by,
)

_DTYPES = [torch.float32, torch.bfloat16]
# odd sizes on both sides of a panel's 32 columns and of a step's 2 values, and several passes of K
_SHAPES = [(1, 1), (33, 7), (96, 64), (100, 513), (65, 2101)]
_ROWS = [*range(1, 41), 100, 513]


@pytest.fixture(params=EACH_LEVEL)
def kernels(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The ops at one instruction set."""
    found = ops_of(
        "core", request.param, write="pack_linear", linear="packed_linear", rows="packed_rows"
    )
    found.pack = partial(packed_by, found.write)
    return found


def _assert_close(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    a, w = x.double(), weight.double()
    b = torch.zeros(len(w), dtype=torch.float64) if bias is None else bias.double()
    exact = a @ w.T + b
    bound = (x.shape[1] + 2) * 2.0**-24 * (a.abs() @ w.abs().T + b.abs())
    assert_within(result, exact, bound)


@pytest.mark.parametrize("shape", _SHAPES, ids=name_of)
@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
def test_every_number_of_rows_gives_the_same_bits_within_the_error_bound(
    kernels: SimpleNamespace, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, weight, bias = linear_problem(513, *shape, dtype)
    packed = kernels.pack(weight)
    whole = kernels.linear(x, packed, bias, shape[0], False)
    assert whole.dtype == dtype
    _assert_close(whole, x, weight, bias)
    for rows in _ROWS:
        # the last rows: a row has another position in its block each time
        assert torch.equal(kernels.linear(x[-rows:], packed, bias, shape[0], False), whole[-rows:])
    plain = kernels.linear(x[:9], packed, None, shape[0], False)
    _assert_close(plain, x[:9], weight, None)


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize("rows", [1, 9, 150])
def test_the_number_of_threads_does_not_show(
    kernels: SimpleNamespace, set_threads: Callable[[int], None], dtype: torch.dtype, rows: int
) -> None:
    x, weight, bias = linear_problem(rows, 650, 770, dtype)
    results = []
    for threads in (1, 2, 4, 8):
        set_threads(threads)
        packed = kernels.pack(weight)
        results.append((packed, kernels.linear(x, packed, bias, 650, False)))
    _assert_close(results[0][1], x, weight, bias)
    for packed, result in results[1:]:
        assert torch.equal(packed, results[0][0])
        assert torch.equal(result, results[0][1])


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
def test_more_rows_than_are_packed_at_a_time(kernels: SimpleNamespace, dtype: torch.dtype) -> None:
    # 16 KiB of activations a row, 384 KiB at a time: many groups, and workers share some of them
    x, weight, bias = linear_problem(560, 33, 8192 if dtype == torch.bfloat16 else 4096, dtype)
    packed = kernels.pack(weight)
    whole = kernels.linear(x, packed, bias, 33, False)
    _assert_close(whole, x, weight, bias)
    assert torch.equal(whole[-1:], kernels.linear(x[-1:], packed, bias, 33, False))


@pytest.mark.parametrize("columns", [2048, 2056, 2080])
def test_a_result_larger_than_a_cache_has_the_bits_of_its_parts(
    kernels: SimpleNamespace, columns: int
) -> None:
    """Matrix tiles stream the result, unless its rows begin within a cache line (2056 columns)."""
    x, weight, bias = linear_problem(600, columns, 40, torch.bfloat16)
    packed = kernels.pack(weight)
    for float32_output in (False, True):
        whole = kernels.linear(x, packed, bias, columns, float32_output)
        parts = [kernels.linear(p, packed, bias, columns, float32_output) for p in x.split(60)]
        assert torch.equal(whole, torch.cat(parts))


def test_float32_output_is_what_bfloat16_output_rounds(kernels: SimpleNamespace) -> None:
    x, weight, bias = linear_problem(21, 70, 130, torch.bfloat16)
    packed = kernels.pack(weight)
    sums = kernels.linear(x, packed, bias, 70, True)
    assert sums.dtype == torch.float32
    _assert_close(sums, x, weight, bias)
    assert torch.equal(sums.bfloat16(), kernels.linear(x, packed, bias, 70, False))


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
def test_no_rows(kernels: SimpleNamespace, dtype: torch.dtype) -> None:
    _, weight, bias = linear_problem(1, 40, 12, dtype)
    packed = kernels.pack(weight)
    result = kernels.linear(torch.empty(0, 12, dtype=dtype), packed, bias, 40, False)
    assert result.shape == (0, 40)
    assert result.dtype == dtype
    assert kernels.rows(packed, torch.empty(0, dtype=torch.int64), 40, 12).shape == (0, 12)
    assert kernels.pack(weight[:0]).shape == (0, *packed.shape[1:])


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
def test_infinities_and_nans_stay_in_their_row(
    kernels: SimpleNamespace, dtype: torch.dtype
) -> None:
    # K and N are odd: infinity and NaN must not be multiplied by the zeros of the padding
    x, weight, _ = linear_problem(3, 33, 7, dtype)
    x[0, 6] = torch.inf
    x[1, 2] = torch.nan
    result = kernels.linear(x, kernels.pack(weight), None, 33, False)
    assert torch.equal(result[0], torch.inf * weight[:, 6].sign())
    assert bool(result[1].isnan().all())
    _assert_close(result[2:], x[2:], weight, None)


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [*_SHAPES, (32, 2), (256, 34)], ids=name_of)
def test_pack_and_unpack_are_exact(
    kernels: SimpleNamespace, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    _, weight, _ = linear_problem(1, *shape, dtype)
    packed = kernels.pack(weight)
    assert packed.is_contiguous()
    assert torch.equal(unpack_linear_weight(packed, *shape), weight)
    everything = unpack_linear_weight(packed, packed.shape[0] * 32, packed[0].numel() // 32)
    everything[: shape[0], : shape[1]] = 0
    assert not bool(everything.any())


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize("borders", [(0, 64, 96, 140), (0, 5, 33, 50, 61, 140)], ids=name_of)
def test_parts_in_any_order_are_the_whole_matrix(
    kernels: SimpleNamespace, dtype: torch.dtype, borders: tuple[int, ...]
) -> None:
    weight = torch.randn(140, 33).to(dtype)
    for write in (kernels.write, _pack_reference):
        packed = torch.full_like(kernels.pack(weight), 7)
        for first, end in reversed([*pairwise(borders)]):
            write(packed, weight[first:end], first)
        assert bool((packed[-1, :, 12:] == 7).all()), "the padding was written"
        zero_padding(packed, 140)
        assert torch.equal(packed, kernels.pack(weight))


def test_parts_that_do_not_fit_are_refused(kernels: SimpleNamespace) -> None:
    packed = kernels.pack(torch.zeros(40, 8))
    for first_row in (-1, 62):
        with pytest.raises(ValueError, match=f"rows {first_row} to {first_row + 3} do not fit"):
            kernels.write(packed, torch.zeros(3, 8), first_row)
    with pytest.raises(ValueError, match="2 panels and 8 steps does not hold 64 x 9 values"):
        kernels.write(packed, torch.zeros(3, 9), 0)
    with pytest.raises(ValueError, match="packed must have the dtype of the weight"):
        kernels.write(packed, torch.zeros(3, 8, dtype=torch.bfloat16), 0)


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
def test_rows_of_a_wider_matrix_are_packed(kernels: SimpleNamespace, dtype: torch.dtype) -> None:
    wide = torch.randn(50, 90).to(dtype)
    part = wide[3:40, 11:72]
    assert torch.equal(kernels.pack(part), kernels.pack(part.contiguous()))


def test_the_layout_is_panels_of_32_rows_in_pairs() -> None:
    weight = torch.arange(34 * 3, dtype=torch.bfloat16).view(34, 3)  # W[n, k] = 3n + k
    packed = pack_linear_weight(weight)
    assert packed.shape == (2, 2, 32, 2)
    assert packed[0, 0, :3].tolist() == [[0, 1], [3, 4], [6, 7]]
    assert packed[0, 1, :3].tolist() == [[2, 0], [5, 0], [8, 0]]
    assert packed[1, 0, :4].tolist() == [[96, 97], [99, 100], [0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=name_of)
@pytest.mark.parametrize("shape", _SHAPES, ids=name_of)
def test_packed_rows_are_embeddings(
    kernels: SimpleNamespace, dtype: torch.dtype, ids_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    _, weight, _ = linear_problem(1, *shape, dtype)
    ids = torch.arange(150, dtype=ids_dtype).mul(37).remainder(shape[0])[::2]
    rows = kernels.rows(kernels.pack(weight), ids, *shape)
    assert rows.is_contiguous()
    assert torch.equal(rows, nn.functional.embedding(ids, weight))


@pytest.mark.parametrize("wrong", [-1, 40, 2**31])
def test_an_id_out_of_range_is_named(wrong: int) -> None:
    packed = pack_linear_weight(torch.zeros(40, 8))
    message = rf"ids\[1\] is {wrong}, not a row of the weight: 0 to 39"
    with pytest.raises(ValueError, match=message):
        packed_rows(packed, torch.tensor([0, wrong]), 40, 8)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 33),
    out_features=st.integers(1, 130),
    in_features=st.integers(1, 90),
    dtype=st.sampled_from(_DTYPES),
    has_bias=st.booleans(),
)
def test_any_shape_against_the_reference(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, has_bias: bool
) -> None:
    x, weight, bias = linear_problem(rows, out_features, in_features, dtype)
    packed = pack_linear_weight(weight)
    chosen = bias if has_bias else None
    result = packed_linear(x, packed, chosen, out_features)
    reference = packed_linear_reference(x, packed, chosen, out_features, False)
    for each in (result, reference):
        assert each.dtype == dtype
        _assert_close(each, x, weight, chosen)


def test_bad_arguments_are_refused() -> None:
    packed = pack_linear_weight(torch.zeros(40, 8))
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="x must have the dtype of the packed weight"):
        packed_linear(x.bfloat16(), packed, None, 40)
    with pytest.raises(ValueError, match="2 panels and 8 steps does not hold 40 x 9 values"):
        packed_linear(torch.zeros(2, 9), packed, None, 40)
    with pytest.raises(ValueError, match="2 panels and 8 steps does not hold 70 x 8 values"):
        packed_linear(x, packed, None, 70)
    with pytest.raises(ValueError, match="x must be a matrix with contiguous rows"):
        packed_linear(torch.zeros(8, 2).T, packed, None, 40)
    with pytest.raises(ValueError, match="must come from pack_linear_weight"):
        packed_linear(x, torch.zeros(40, 8), None, 40)
    with pytest.raises(ValueError, match="a packed weight must be contiguous"):
        packed_linear(x, packed.transpose(0, 1).contiguous().transpose(0, 1), None, 40)
    for bias in (torch.zeros(39), torch.zeros(40, dtype=torch.bfloat16), torch.zeros(80)[::2]):
        with pytest.raises(ValueError, match="bias must be a contiguous vector of out_features"):
            packed_linear(x, packed, bias, 40)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(4, 4, dtype=torch.float16), "take float32 and bfloat16, but the weight is"),
        (torch.zeros(4, 4, 4), "a linear weight has 2 dimensions, but this one has 3"),
        (torch.zeros(0, 4), "the weight is empty"),
        (torch.zeros(4, 6).T, "rows must be contiguous"),
        (torch.zeros(4, 4, device="meta"), "the weight is on meta"),
    ],
)
def test_what_can_not_be_packed_says_why(weight: Tensor, reason: str) -> None:
    assert reason in str(why_unpackable(weight))
    with pytest.raises(ValueError, match=reason):
        pack_linear_weight(weight)


def test_what_can_be_packed() -> None:
    assert why_unpackable(torch.zeros(3, 5)) is None
    assert why_unpackable(nn.Parameter(torch.zeros(3, 8, dtype=torch.bfloat16)[:, :5])) is None


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
def test_the_registrations_pass_opcheck(dtype: torch.dtype) -> None:
    x, weight, bias = linear_problem(5, 45, 21, dtype)
    packed = pack_linear_weight(weight)
    ops = torch.ops.ostinato
    torch.library.opcheck(ops.pack_linear.default, (packed, weight[:9], 32))
    torch.library.opcheck(ops.packed_linear.default, (x, packed, bias, 45, False))
    torch.library.opcheck(ops.packed_linear.default, (x, packed, None, 45, True))
    torch.library.opcheck(ops.packed_rows.default, (packed, torch.tensor([44, 1]), 45, 21))


# Inductor's compiler takes 20 s here. tests/graphs/compiler compiles layers with it.
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_one_graph_serves_every_number_of_rows(compiler: str) -> None:
    _, embedding, _ = linear_problem(1, 60, 24, torch.bfloat16)
    _, weight, bias = linear_problem(1, 24, 24, torch.bfloat16)
    embedding_packed, weight_packed = pack_linear_weight(embedding), pack_linear_weight(weight)

    def program(ids: Tensor) -> Tensor:
        hidden = packed_rows(embedding_packed, ids, 60, 24)
        hidden = hidden + packed_linear(hidden, weight_packed, bias, 24).relu()
        return packed_linear(hidden, embedding_packed, None, 60, float32_output=True)

    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=counter)
    for rows in (3, 2, 17, 100):  # torch.compile always makes separate programs for 0 and 1
        ids = torch.arange(rows) * 7 % 60
        result = compiled(ids)
        assert result.dtype == torch.float32
        assert result.stride() == (60, 1)
        assert torch.equal(result, program(ids))
    assert counter.frame_count == 1
