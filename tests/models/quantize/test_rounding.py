"""Rounding a matrix: to the nearest integers, and for the activations of a text."""

from __future__ import annotations

import pytest
import torch

from ostinato.models.quantize.packing import FORMATS, pack
from ostinato.models.quantize.rounding import choose_grid, round_by_hessian, round_to_nearest
from tests.models.quantized_checkpoints.writers import Form, awq, gptq, pack_quantized


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_nearest_is_within_half_a_step(bits: int, symmetric: bool) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    grid = choose_grid(weight, bits, 32, torch.float16, symmetric=symmetric)
    assert torch.equal(grid.scales.half().float(), grid.scales)
    error = (round_to_nearest(weight, grid).restored() - weight).abs()
    # A step more at the ends of the range, where rounded scales and zero points clip.
    assert bool((error <= 1.01 * grid.spread(96)[0]).all())
    assert float((error / grid.spread(96)[0]).mean()) < 0.26


def test_the_hessian_lowers_the_error_of_products() -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(128, 128, generator=generator) * torch.rand(128, generator=generator)
    x = torch.randn(2000, 128, generator=generator) @ mixing
    weight = torch.randn(64, 128, generator=generator)
    hessian = x.T @ x / len(x)
    plain = choose_grid(weight, 4, 32, torch.float16, symmetric=True)
    nearest = round_to_nearest(weight, plain).restored()
    grid = choose_grid(weight, 4, 32, torch.float16, symmetric=True, importance=hessian.diagonal())
    rounded = round_by_hessian(weight, grid, hessian).restored()
    errors = [float(((each - weight) @ x.T).norm()) for each in (nearest, rounded)]
    assert errors[1] < 0.6 * errors[0]
    # A text in which no input is active gives no reason to move a weight.
    empty = round_by_hessian(weight, plain, torch.zeros(128, 128)).restored()
    assert torch.equal(empty, nearest)


def test_packing_is_that_of_the_formats() -> None:
    weight = torch.randn(32, 64)
    grid = choose_grid(weight, 4, 32, torch.float16, symmetric=False)
    rounded = round_to_nearest(weight, grid)
    restored = rounded.restored()
    for name, writer in zip(FORMATS, (gptq, awq, pack_quantized), strict=True):
        ours = pack("m", rounded, name, symmetric=False)
        # A writer of the tests finds the same integers again, as the weights are on the grid.
        theirs, _ = writer("m", restored, Form("gptq", symmetric=False))
        assert ours.keys() == theirs.keys()
        assert all(ours[key].shape == theirs[key].shape for key in ours)
