"""Rounding a matrix: to the nearest integers, and with the Hessian of a text's activations."""

from __future__ import annotations

import pytest
import torch

from ostinato.models.quantize.packing import FORMATS, pack
from ostinato.models.quantize.refinement import refine
from ostinato.models.quantize.rounding import (
    choose_grid,
    damped,
    round_by_hessian,
    round_to_nearest,
)
from tests.models.quantized_checkpoints.writers import Form, awq, gptq, pack_quantized


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_nearest_is_within_half_a_step(bits: int, symmetric: bool) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    grid = choose_grid(weight, bits, 32, torch.float16, symmetric=symmetric)
    assert torch.equal(grid.scales.half().float(), grid.scales)
    error = (round_to_nearest(weight, grid).restored() - weight).abs()
    # The error is up to a whole step at the ends of the range, where rounded scales and zero
    # points clip.
    assert bool((error <= 1.01 * grid.spread(96)[0]).all())
    assert float((error / grid.spread(96)[0]).mean()) < 0.26


def test_the_hessian_lowers_the_error_of_products() -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(128, 128, generator=generator) * torch.rand(128, generator=generator)
    x = torch.randn(2000, 128, generator=generator) @ mixing
    weight = torch.randn(64, 128, generator=generator)
    hessian = damped(x.T @ x / len(x))
    plain = choose_grid(weight, 4, 32, torch.float16, symmetric=True)
    nearest = round_to_nearest(weight, plain).restored()
    grid = choose_grid(weight, 4, 32, torch.float16, symmetric=True, importance=hessian.diagonal())
    rounded = round_by_hessian(weight, grid, hessian)
    refined = refine(rounded, weight, hessian, torch.float16)
    assert torch.equal(refined.grid.scales.half().float(), refined.grid.scales)
    weights = (nearest, rounded.restored(), refined.restored())
    errors = [float(((each - weight) @ x.T).norm()) for each in weights]
    assert errors[1] < 0.6 * errors[0]
    assert errors[2] < 0.96 * errors[1]
    # If all activations of the text are 0, each weight is rounded to the nearest integer.
    empty = round_by_hessian(weight, plain, damped(torch.zeros(128, 128))).restored()
    assert torch.equal(empty, nearest)


@pytest.mark.parametrize("symmetric", [True, False])
def test_refinement_lowers_the_error_of_every_row(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 64, generator=generator)  # fewer tokens than columns
    weight = torch.randn(48, 64, generator=generator)
    weight[5] = 0.0
    hessian = damped(x.T @ x / len(x))
    grid = choose_grid(weight, 4, 32, torch.float16, symmetric=symmetric)
    before = round_to_nearest(weight, grid)
    after = refine(before, weight, hessian, torch.float16)
    errors = [
        (((each.restored() - weight) @ hessian) * (each.restored() - weight)).sum(1)
        for each in (before, after)
    ]
    assert bool((errors[1] <= errors[0] * 1.0001).all())
    assert float(errors[1].sum()) < 0.8 * float(errors[0].sum())
    assert torch.equal(after.grid.zeros, before.grid.zeros)
    assert bool((after.grid.scales > 0).all())
    assert int(after.values.amax()) <= 15


def test_packing_is_that_of_the_formats() -> None:
    weight = torch.randn(32, 64)
    grid = choose_grid(weight, 4, 32, torch.float16, symmetric=False)
    rounded = round_to_nearest(weight, grid)
    restored = rounded.restored()
    for name, writer in zip(FORMATS, (gptq, awq, pack_quantized), strict=True):
        ours = pack("m", rounded, name, symmetric=False)
        # The tests' own writer of the format gives tensors of the same names and shapes.
        theirs, _ = writer("m", restored, Form("gptq", symmetric=False))
        assert ours.keys() == theirs.keys()
        assert all(ours[key].shape == theirs[key].shape for key in ours)
