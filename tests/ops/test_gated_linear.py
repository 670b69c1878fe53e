"""`packed_gated_linear` against the two ops that it replaces, bit for bit, at every level."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops.activation import ACTIVATIONS, plain_activation
from ostinato.ops.linear.packed_linear import (
    pack_linear_weight,
    packed_gated_linear,
    packed_linear,
    packed_linear_reference,
)
from tests.ops.kernel_checks import EACH_LEVEL, linear_problem, name_of, ops_of, packed_by

_DTYPES = [torch.float32, torch.bfloat16]
# on both sides of 16 rows, from which on the halves are joined; the last one fills several groups
_ROWS = [0, 1, 15, 16, 17, 33, 150, 600]


@pytest.fixture(params=EACH_LEVEL)
def kernels(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The ops at one instruction set."""
    found = ops_of(
        "core",
        request.param,
        write="pack_linear",
        linear="packed_linear",
        gated="packed_gated_linear",
        activation="activation",
    )
    found.pack = partial(packed_by, found.write)
    return found


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(64, 7), (192, 513), (1088, 70)], ids=name_of)
def test_the_bits_are_those_of_a_linear_layer_and_its_activation(
    kernels: SimpleNamespace, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """600 rows of 544 results are streamed in bfloat16."""
    size = shape[0]
    x, weight, bias = linear_problem(600, *shape, dtype)
    packed = kernels.pack(weight)
    for chosen in (None, bias):
        whole = kernels.activation(kernels.linear(x, packed, chosen, size, False), "silu", True)
        for rows in _ROWS:
            result = kernels.gated(x[600 - rows :], packed, chosen, size, "silu")
            assert torch.equal(result, whole[600 - rows :])


@pytest.mark.parametrize("kind", sorted({*ACTIVATIONS.values(), "swigluoai"}))
def test_every_activation(kernels: SimpleNamespace, kind: str) -> None:
    x, weight, bias = linear_problem(40, 128, 64, torch.bfloat16)
    packed = kernels.pack(weight * 8)
    both = kernels.linear(x, packed, bias, 128, False)
    assert torch.equal(
        kernels.gated(x, packed, bias, 128, kind), kernels.activation(both, kind, True)
    )


@pytest.mark.parametrize("rows", [3, 150])
def test_the_number_of_threads_does_not_show(
    kernels: SimpleNamespace, set_threads: Callable[[int], None], rows: int
) -> None:
    x, weight, bias = linear_problem(rows, 640, 770, torch.bfloat16)
    packed = kernels.pack(weight)
    results = []
    for threads in (1, 2, 8):
        set_threads(threads)
        results.append(kernels.gated(x, packed, bias, 640, "silu"))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    panels=st.integers(1, 4),
    in_features=st.integers(1, 90),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    has_bias=st.booleans(),
)
def test_any_shape_is_within_rounding_of_the_reference(
    rows: int, panels: int, in_features: int, activation: str, has_bias: bool
) -> None:
    x, weight, bias = linear_problem(rows, 64 * panels, in_features, torch.float32)
    packed, chosen = pack_linear_weight(weight), bias if has_bias else None
    result = packed_gated_linear(x, packed, chosen, 64 * panels, activation)
    both = packed_linear_reference(x, packed, chosen, 64 * panels, False)
    reference = plain_activation(both.double(), ACTIVATIONS[activation], True)
    torch.testing.assert_close(result.double(), reference, rtol=1e-4, atol=1e-4)


def test_bad_arguments_are_refused() -> None:
    packed, x = pack_linear_weight(torch.zeros(96, 8)), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="must be whole panels of 32 rows, got 96 rows"):
        packed_gated_linear(x, packed, None, 96, "silu")
    packed = pack_linear_weight(torch.zeros(64, 8))
    with pytest.raises(ValueError, match="x must have the dtype of the packed weight"):
        packed_gated_linear(x.bfloat16(), packed, None, 64, "silu")
    with pytest.raises(ValueError, match="bias must be a contiguous vector of out_features"):
        packed_gated_linear(x, packed, torch.zeros(32), 64, "silu")


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
def test_the_registration_passes_opcheck(dtype: torch.dtype) -> None:
    x, weight, bias = linear_problem(5, 64, 21, dtype)
    packed = pack_linear_weight(weight)
    assert packed_linear(x, packed, bias, 64).shape == (5, 64)
    for chosen in (None, bias):
        arguments = (x, packed, chosen, 64, "silu")
        torch.library.opcheck(torch.ops.ostinato.packed_gated_linear.default, arguments)
