"""Helpers of the C++ kernel tests: runnable instruction sets, random problems, error bounds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ostinato.ops.linear.packed_linear import empty_packed, zero_padding
from ostinato.ops.native.instruction_sets import runnable_levels
from ostinato.ops.native.library import load

__all__ = (
    "EACH_LEVEL",
    "LEVELS",
    "QUICK_LEVELS",
    "SLOW_LEVELS",
    "assert_within",
    "linear_problem",
    "name_of",
    "ops_of",
    "packed_by",
)

LEVELS = [*runnable_levels(), f"amx_on_{next(n for n in runnable_levels() if n != 'amx')}"]
"""The instruction sets that this machine runs, and the emulation of matrix tiles over the best one
without AMX."""

_HAS_TWIN = {"avx512": "avx512bf16", LEVELS[-1]: "amx"}
SLOW_LEVELS = [level for level in LEVELS if _HAS_TWIN.get(level) in LEVELS]
"""Levels whose tests are marked slow, because each takes half a minute to compile. On a processor
with avx512bf16, avx512 is one of them: only its products of bfloat16 and of bytes differ. On a
processor with AMX, the emulation is one of them: test_amx.py compares it with AMX."""

QUICK_LEVELS = [level for level in LEVELS if level not in SLOW_LEVELS]
EACH_LEVEL = [
    pytest.param(level, marks=pytest.mark.slow if level in SLOW_LEVELS else ()) for level in LEVELS
]
"""LEVELS as test parameters; those of SLOW_LEVELS are marked slow."""


def ops_of(library: str, level: str, **names: str) -> SimpleNamespace:
    """Ops of a native library at one level; `names` maps attributes to names of ops.

    The caller must have imported the modules that define the ops.
    """
    ops = getattr(torch.ops, load(library, level).namespace)
    return SimpleNamespace(
        **{attribute: getattr(ops, name).default for attribute, name in names.items()}
    )


def packed_by(write: Callable[[Tensor, Tensor, int], None], weight: Tensor) -> Tensor:
    """A linear weight, packed by the op `pack_linear` of a library."""
    packed = empty_packed(weight)
    write(packed, weight, 0)
    zero_padding(packed, len(weight))
    return packed


def name_of(value: object) -> str:
    """A dtype or a shape in a test's name."""
    return str(value).removeprefix("torch.")


def linear_problem(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Random x, weight and bias. The row stride of x is larger than its rows."""
    generator = torch.Generator().manual_seed(rows * 7919 + out_features * 31 + in_features)
    x = torch.randn(rows, in_features + 3, generator=generator).to(dtype)[:, :in_features]
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    return x, weight, bias


def assert_within(result: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Check that `result` is contiguous and within `bound` of `exact` (float64).

    For a bfloat16 result the error of the last rounding is added to the bound.
    """
    if result.dtype == torch.bfloat16:
        bound = bound + 2.0**-8 * (exact.abs() + bound)
    assert result.shape == exact.shape
    assert result.is_contiguous()
    excess = (result.double() - exact).abs() - bound
    assert bool((excess <= 0).all()), f"worst excess {excess.max()}"
