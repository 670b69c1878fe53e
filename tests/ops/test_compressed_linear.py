"""Compressed weights hold the same values, and give the same bits as packed weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.linear.compressed_linear import (
    compress_linear_reference,
    compress_linear_rows,
    compress_linear_weight,
    compressed_gated_linear,
    compressed_linear,
    compressed_rows,
    compressed_shape,
    decompress_linear_weight,
    join_exceptions,
)
from ostinato.ops.linear.packed_linear import pack_linear_weight, packed_linear
from tests.ops.kernel_checks import EACH_LEVEL, linear_problem, name_of, ops_of, packed_by

# on both sides of the rows that are multiplied in registers, of a tile's, and of gated units
_ROWS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 33, 150, 600]
_SHAPES = [(64, 7), (192, 513), (1088, 70), (96, 2600)]
_KINDS = ["normal", "exceptions", "whole", "mixed", "zero"]


def _weight(kind: str, out_features: int, in_features: int) -> Tensor:
    """A matrix of one kind: `exceptions` has a few, `whole` is too diverse to be compressed."""
    weight = linear_problem(1, out_features, in_features, torch.bfloat16)[1]
    generator = torch.Generator().manual_seed(in_features)
    few = torch.rand(weight.shape, generator=generator) < 0.003
    exponents = torch.randint(-60, 60, weight.shape, generator=generator)
    diverse = torch.ldexp(weight.float(), exponents).bfloat16()
    if kind == "exceptions":
        return torch.where(few, diverse, weight)
    if kind == "whole":
        return diverse
    if kind == "mixed":  # panels of every kind, and zeros
        third = torch.arange(out_features)[:, None] // 32 % 3
        weight = torch.where(third == 0, diverse, torch.where(few, diverse, weight))
        return weight.where(torch.rand(weight.shape, generator=generator) > 0.1, 0.0)
    return torch.zeros_like(weight) if kind == "zero" else weight


@pytest.fixture(params=EACH_LEVEL)
def kernels(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The ops at one instruction set."""
    found = ops_of(
        "core",
        request.param,
        write="pack_linear",
        packed="packed_linear",
        packed_gated="packed_gated_linear",
        compress="compress_linear",
        linear="compressed_linear",
        gated="compressed_gated_linear",
        rows="compressed_rows",
    )
    found.pack = partial(packed_by, found.write)
    return found


def _compressed(kernels: SimpleNamespace, weight: Tensor) -> tuple[Tensor, Tensor]:
    compressed = torch.full(compressed_shape(*weight.shape), 255, dtype=torch.uint8)
    return compressed, kernels.compress(compressed, weight, 0)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("shape", [*_SHAPES, (1, 1), (45, 33)], ids=name_of)
def test_compression_loses_nothing(
    kernels: SimpleNamespace, shape: tuple[int, int], kind: str
) -> None:
    weight = _weight(kind, *shape)
    compressed, exceptions = _compressed(kernels, weight)
    restored = decompress_linear_weight(compressed, exceptions, *shape)
    assert torch.equal(restored.view(torch.int16), weight.view(torch.int16))
    ids = torch.arange(shape[0] - 1, -1, -1)
    rows = kernels.rows(compressed, exceptions, ids, *shape)
    assert torch.equal(rows.view(torch.int16), weight.flip(0).view(torch.int16))


@pytest.mark.parametrize("kind", ["normal", "mixed"])
def test_the_sizes(kernels: SimpleNamespace, kind: str) -> None:
    """Normal numbers take 12 bits; a panel that is stored as a whole takes 28."""
    compressed, exceptions = _compressed(kernels, _weight(kind, 960, 1024))
    bits = 8 * (compressed.nbytes + exceptions.nbytes) / (960 * 1024)
    assert 12 < bits < 12.1 if kind == "normal" else 12 + 16 / 3 < bits < 12.5 + 16 / 3


@pytest.mark.parametrize("kind", ["exceptions", "mixed"])
@pytest.mark.parametrize("shape", _SHAPES, ids=name_of)
def test_the_bits_are_those_of_packed_weights(
    kernels: SimpleNamespace, shape: tuple[int, int], kind: str
) -> None:
    """Also those of gated units. 600 rows of 1,088 results are streamed in bfloat16."""
    size = shape[0]
    x, _, bias = linear_problem(600, *shape, torch.bfloat16)
    weight = _weight(kind, *shape)
    packed, compressed = kernels.pack(weight), _compressed(kernels, weight)
    residual = x.new_ones((600, size))
    for chosen in (None, bias):
        expected = kernels.packed(x, packed, chosen, size, False)
        wide = kernels.packed(x, packed, chosen, size, True)
        added = kernels.packed(x, packed, chosen, size, False, residual)
        for rows in _ROWS:
            some, from_row = x[600 - rows :], 600 - rows
            result = kernels.linear(some, *compressed, chosen, size, False)
            assert torch.equal(result, expected[from_row:])
            result = kernels.linear(some, *compressed, chosen, size, True)
            assert torch.equal(result, wide[from_row:])
            result = kernels.linear(some, *compressed, chosen, size, False, residual[from_row:])
            assert torch.equal(result, added[from_row:])
            if size % 64 == 0:
                expected_unit = kernels.packed_gated(some, packed, chosen, size, "silu")
                unit = kernels.gated(some, *compressed, chosen, size, "silu")
                assert torch.equal(unit, expected_unit)


@pytest.mark.parametrize("rows", [1, 8, 40, 150])
def test_the_number_of_threads_does_not_show(
    kernels: SimpleNamespace, set_threads: Callable[[int], None], rows: int
) -> None:
    x, _, bias = linear_problem(rows, 640, 770, torch.bfloat16)
    weight = _weight("mixed", 640, 770)
    results: list[Tensor] = []
    for threads in (1, 2, 8):
        set_threads(threads)
        compressed = _compressed(kernels, weight)
        assert torch.equal(decompress_linear_weight(*compressed, 640, 770), weight)
        results.append(kernels.linear(x, *compressed, bias, 640, False))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@settings(max_examples=60, deadline=None)
@given(
    out_features=st.integers(1, 130),
    in_features=st.integers(1, 100),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0, 3, 15, 16, 40, 255]),
)
def test_any_bits_survive(out_features: int, in_features: int, seed: int, spread: int) -> None:
    """Also infinities, NaNs and subnormals; kernels and plain torch read each other's results."""
    generator = torch.Generator().manual_seed(seed)
    size = (out_features, in_features)
    lowest = int(torch.randint(0, 256 - spread, (1,), generator=generator))
    exponents = torch.randint(lowest, lowest + spread + 1, size, generator=generator)
    others = torch.randint(0, 256, size, generator=generator)  # sign and mantissa
    bits = (others & 0x80) << 8 | exponents << 7 | (others & 0x7F)
    weight = bits.to(torch.int16).view(torch.bfloat16)
    compressed, exceptions = compress_linear_weight(weight)
    restored = decompress_linear_weight(compressed, exceptions, *size)
    assert torch.equal(restored.view(torch.int16), weight.view(torch.int16))
    plain = torch.empty_like(compressed)
    aside = compress_linear_reference(plain, weight, 0)
    rows = compressed_rows(plain, aside, torch.arange(out_features), *size)
    assert torch.equal(rows.view(torch.int16), weight.view(torch.int16))


@given(
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kind=st.sampled_from(_KINDS),
    last=st.integers(0, 31),
)
@settings(max_examples=30, deadline=None)
def test_rows_may_be_compressed_in_parts(cuts: list[int], kind: str, last: int) -> None:
    weight = _weight(kind, 32 * sum(cuts) + last, 40)
    compressed = torch.empty(compressed_shape(*weight.shape), dtype=torch.uint8)
    ends = torch.tensor(cuts).cumsum(0).mul(32).tolist()
    ends[-1] = len(weight)
    parts: dict[int, Tensor] = {}
    for begin, end in reversed(list(zip([0, *ends[:-1]], ends, strict=True))):
        parts[begin] = compress_linear_rows(compressed, weight[begin:end], begin)
    exceptions = join_exceptions(compressed, parts)
    restored = decompress_linear_weight(compressed, exceptions, *weight.shape)
    assert torch.equal(restored, weight)
    x = linear_problem(3, 32, 40, torch.bfloat16)[0]
    expected = packed_linear(x, pack_linear_weight(weight), None, len(weight))
    assert torch.equal(compressed_linear(x, compressed, exceptions, None, len(weight)), expected)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="only bfloat16 weights are compressed"):
        compress_linear_weight(torch.zeros(40, 8))
    weight = torch.zeros(64, 8, dtype=torch.bfloat16)
    compressed, exceptions = compress_linear_weight(weight)
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="must begin a panel of 32 rows, and fit into 2 panels"):
        compress_linear_rows(compressed, weight, 32)
    with pytest.raises(ValueError, match="x must have the dtype of the packed weight"):
        compressed_linear(x.float(), compressed, exceptions, None, 64)
    with pytest.raises(ValueError, match="as compress_linear_weight returns it"):
        compressed_linear(x, compressed, exceptions, None, 96)
    with pytest.raises(ValueError, match="exceptions must be the bytes"):
        compressed_linear(x, compressed, exceptions[:8], None, 64)
    with pytest.raises(ValueError, match="bias must be a contiguous vector of out_features"):
        compressed_linear(x, compressed, exceptions, torch.zeros(32), 64)
    with pytest.raises(ValueError, match=r"ids\[1\] is 64, not a row of the weight: 0 to 63"):
        compressed_rows(compressed, exceptions, torch.tensor([0, 64]), 64, 8)


def test_the_registration_passes_opcheck() -> None:
    x, weight, bias = linear_problem(5, 64, 21, torch.bfloat16)
    compressed = compress_linear_weight(weight)
    assert compressed_gated_linear(x, *compressed, bias, 64, "silu").shape == (5, 32)
    ops = torch.ops.ostinato
    for chosen in (None, bias):
        arguments = (x, *compressed, chosen, 64, False)
        torch.library.opcheck(ops.compressed_linear.default, arguments)
        arguments = (x, *compressed, chosen, 64, "silu")
        torch.library.opcheck(ops.compressed_gated_linear.default, arguments)
    torch.library.opcheck(ops.compressed_rows.default, (*compressed, torch.tensor([1]), 64, 21))
