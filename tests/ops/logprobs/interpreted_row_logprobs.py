"""The Triton kernel of `row_logprobs` under Triton's interpreter.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from ostinato.ops.logprobs import row_logprobs as module
from ostinato.ops.logprobs.row_logprobs import RowLogprobs
from tests.ops.logprobs.logit_rows import check, make_rows


@pytest.mark.parametrize("form", ["normal", "ties", "masked", "none"])
@pytest.mark.parametrize("vocabulary", [1, 5, 4096, 9000])
def test_results_are_the_definitions(vocabulary: int, form: str) -> None:
    top = min(5, vocabulary)
    check(lambda *a: RowLogprobs(*module._on_cuda(*a)), 1, vocabulary, form, 18, top)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    rows = make_rows(2, 9, 9000, "normal")
    ids = torch.arange(18).reshape(9, 2)
    whole = module._on_cuda(rows, ids, 3)
    for row in range(9):
        part = module._on_cuda(rows[row : row + 1], ids[row : row + 1], 3)
        for one, column in zip(part, whole, strict=True):
            assert torch.equal(one[0], column[row])
