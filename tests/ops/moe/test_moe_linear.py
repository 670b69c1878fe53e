"""Linear ops over experts, on every instruction set that this processor runs.

A row must have the same bits as from the linear op of its expert's matrix. Other test modules check
the errors of the linear ops. This module adds tests of the sum over a token's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.linear.compressed_linear import compress_linear_weight, join_experts
from ostinato.ops.linear.packed_linear import pack_linear_weight
from ostinato.ops.moe.moe_linear import moe_linear, packed_moe_linear
from ostinato.ops.quantized import quantize_linear_weight
from ostinato.ops.quantized_reference import QuantFormat
from tests.ops.kernel_checks import EACH_LEVEL, name_of, ops_of

NUM_EXPERTS, OUT, IN = 5, 70, 140
FORMS = [None, QuantFormat(8, 64, True), QuantFormat(8, 32, False), QuantFormat(4, 64, False)]


def ops(level: str, form: QuantFormat | None) -> SimpleNamespace:
    """The ops over packed or quantised matrices."""
    if form is None:
        names = {"linear": "packed_linear", "moe": "packed_moe_linear"}
        return ops_of("core", level, **names)
    linear = ops_of("quantized", level, linear="quantized_linear").linear
    moe = ops_of("quantized_moe", level, moe="quantized_moe_linear").moe
    return SimpleNamespace(linear=linear, moe=moe)


def stored(weight: Tensor, form: QuantFormat | None) -> Tensor:
    """[experts, ...]: every matrix as its op reads it."""
    make: Callable[[Tensor], Tensor] = (
        pack_linear_weight if form is None else lambda matrix: quantize_linear_weight(matrix, form)
    )
    return torch.stack([make(matrix) for matrix in weight])


def problem(tokens: int, slots: int, dtype: torch.dtype, seed: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    order = torch.rand(tokens, NUM_EXPERTS, generator=generator).argsort(1)
    order[: tokens // 3] = order[:1]  # some experts get many rows, others none
    return SimpleNamespace(
        x=normal(tokens, IN),
        weight=normal(NUM_EXPERTS, OUT, IN),
        bias=normal(NUM_EXPERTS, OUT),
        residual=normal(tokens, OUT),
        ids=order[:, :slots].to(torch.int32).contiguous(),
        weights=torch.rand(tokens, slots, generator=generator),
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "packed" if form is None else form.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("level", EACH_LEVEL)
def test_a_row_has_the_bits_of_its_experts_linear_op(
    level: str, dtype: torch.dtype, form: QuantFormat | None
) -> None:
    kernels, more = ops(level, form), () if form is None else tuple(form)
    linear_more = () if form is None else (None, *form)  # the order of columns
    for tokens, slots in ((1, 3), (7, 1), (150, 3)):
        p = problem(tokens, slots, dtype, tokens)
        weight = stored(p.weight, form)
        each = kernels.moe(p.x, p.ids, weight, p.bias, OUT, None, None, *more)
        whole = kernels.moe(p.x, p.ids, weight, p.bias, OUT, p.weights, p.residual, *more)
        assert each.shape == (tokens * slots, OUT)
        for token in {0, tokens // 2, tokens - 1}:
            x, ids = p.x[token : token + 1], p.ids[token : token + 1]
            exact = torch.zeros(OUT, dtype=torch.float64)
            for slot, expert in enumerate(ids[0].tolist()):
                arguments = (x, weight[expert], p.bias[expert], OUT)
                alone = kernels.linear(*arguments, False, None, *linear_more)
                assert torch.equal(each[token * slots + slot], alone[0])
                row = kernels.linear(*arguments, True, None, *linear_more)[0]
                exact += p.weights[token, slot].double() * row.double()
            exact += p.residual[token].double()
            torch.testing.assert_close(whole[token], exact.to(dtype), atol=1e-4, rtol=1e-2)
            # The same token without the others, and with a copy of its row for each slot.
            more_alone = (p.weights[token : token + 1], p.residual[token : token + 1], *more)
            alone = kernels.moe(x, ids, weight, p.bias, OUT, *more_alone)
            assert torch.equal(alone[0], whole[token])
            rows = x.expand(slots, -1).contiguous()
            assert torch.equal(kernels.moe(rows, ids, weight, p.bias, OUT, *more_alone), alone)


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_compressed_experts_have_the_bits_of_packed_ones(level: str) -> None:
    ops = ops_of("core", level, packed="packed_moe_linear", compressed="compressed_moe_linear")
    for tokens, slots in ((1, 3), (7, 1), (150, 3)):
        p = problem(tokens, slots, torch.bfloat16, tokens)
        p.weight[1] *= torch.logspace(-30, 30, IN)  # too diverse to be compressed
        p.weight[3, 40:, 7] *= 1e30
        packed = stored(p.weight, None)
        matrices = [compress_linear_weight(matrix) for matrix in p.weight]
        weight = torch.stack([matrix for matrix, _ in matrices])
        exceptions = join_experts(weight, [each for _, each in matrices])
        for sums in ((None, None), (p.weights, p.residual)):
            expected = ops.packed(p.x, p.ids, packed, p.bias, OUT, *sums)
            result = ops.compressed(p.x, p.ids, weight, exceptions, p.bias, OUT, *sums)
            assert torch.equal(result, expected)


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(0, 40),
    slots=st.integers(1, NUM_EXPERTS),
    threads=st.sampled_from([1, 2, 3]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_packed_experts_are_the_plain_ones(
    tokens: int, slots: int, threads: int, has_bias: bool, has_residual: bool
) -> None:
    p = problem(tokens, slots, torch.float32, 1)
    bias = p.bias if has_bias else None
    residual = p.residual if has_residual else None
    packed = stored(p.weight, None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for sums in ({}, {"routing_weights": p.weights, "residual": residual}):
            ours = packed_moe_linear(p.x, p.ids, packed, bias, OUT, **sums)
            plain = moe_linear(p.x, p.ids, p.weight, bias, **sums)
            torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_refused() -> None:
    p = problem(4, 2, torch.float32, 2)
    packed = stored(p.weight, None)
    wrong = p.ids.clone()
    wrong[2, 1] = NUM_EXPERTS
    with pytest.raises(ValueError, match=r"ids\[2\] has 5, not an expert: 0 to 4"):
        packed_moe_linear(p.x, wrong, packed, None, OUT)
    with pytest.raises(ValueError, match="experts, 0 to 4"):
        moe_linear(p.x, wrong, p.weight, None)
    for message, changes in {
        "ids must be contiguous int32": {"ids": p.ids.long()},
        "x must be": {"x": p.x[:3]},
        "dtype of the packed": {"x": p.x.bfloat16()},
        "bias must be": {"bias": p.bias[:4]},
        "routing_weights must be": {"routing_weights": p.weights[:3]},
        "needs routing_weights": {"residual": p.residual},
        "does not hold": {"out_features": 200},
    }.items():
        given_arguments = {"x": p.x, "ids": p.ids, "weight": packed, "bias": None} | {
            "out_features": OUT
        }
        with pytest.raises(ValueError, match=message):
            packed_moe_linear(**(given_arguments | changes))
