"""The Triton kernels of greedy and full draws (`draw_unsorted`) under Triton's interpreter.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.ops.sampling.plain_sampling import sample_full
from ostinato.ops.sampling.triton_unsorted_draw import draw_unsorted
from tests.ops.logprobs.logit_rows import make_rows

FORMS = ["normal", "ties", "masked"]


def drawn(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> list[int]:
    count = len(logits)
    paths = torch.ones(count, dtype=torch.float64)
    return draw_unsorted(logits, paths, paths * temperature, uniforms).tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [1e-3, 0.6])
@pytest.mark.parametrize("vocabulary", [1, 5, 4097, 12_500])
def test_draws_are_those_of_plain_torch(vocabulary: int, temperature: float, form: str) -> None:
    logits = make_rows(3, 9, vocabulary, form)
    uniforms = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms[:2] = torch.tensor([1e-6, 0.9999])
    if vocabulary == 1:
        logits = torch.zeros_like(logits)
    expected = sample_full(logits / temperature, uniforms)
    assert drawn(logits, temperature, uniforms) == expected.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_greedy_rows_have_the_first_of_the_likeliest(form: str) -> None:
    logits = make_rows(4, 6, 9000, form)
    zeros = torch.zeros(6, dtype=torch.float64)
    found = draw_unsorted(logits, zeros, zeros + 1.0, zeros)
    assert found.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_a_distribution_that_is_flat_has_every_token() -> None:
    logits = torch.zeros(1, 60).expand(60, -1)
    uniforms = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    assert drawn(logits, 1.0, uniforms) == list(range(60))


def test_tokens_without_mass_are_never_drawn() -> None:
    logits = torch.full((3, 9000), -math.inf)
    logits[0, [7, 8999]] = 0.0
    logits[1, 5] = math.inf  # certain
    logits[1, 6] = 3.0
    logits[2, 4100] = -2000.0
    for uniform in (0.0, 0.499, 0.501, 1.0 - 2.0**-53):
        uniforms = torch.full((3,), uniform, dtype=torch.float64)
        assert drawn(logits, 1.0, uniforms) == [7 if uniform < 0.5 else 8999, 5, 4100]


def test_a_nan_is_impossible_and_a_row_without_a_token_gives_the_first() -> None:
    logits = torch.full((2, 4200), math.nan)
    logits[1, 4199] = 1.0
    uniforms = torch.full((2,), 0.3, dtype=torch.float64)
    assert drawn(logits, 1.0, uniforms) == [0, 4199]


def test_other_rows_do_not_matter() -> None:
    logits = make_rows(5, 9, 9000, "normal")
    uniforms = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    alone = [drawn(logits[i : i + 1], 1.0, uniforms[i : i + 1])[0] for i in range(9)]
    assert drawn(logits, 1.0, uniforms) == alone
