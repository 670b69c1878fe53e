"""The Triton kernels of `add_adapters` under Triton's interpreter.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from ostinato.ops.adapters.triton_adapters import add_adapters_on_cuda
from tests.ops.adapters.adapter_rows import make_rows


@pytest.mark.parametrize(
    ("num_rows", "in_features", "widths", "max_rank"),
    [
        (1, 64, (48,), 8),
        (5, 100, (64, 33, 33), 20),
        (37, 1000, (80, 48), 16),
        (18, 96, (70,), 80),
    ],
)
def test_results_are_those_of_plain_torch(
    num_rows: int, in_features: int, widths: tuple[int, ...], max_rank: int
) -> None:
    rows = make_rows(3, num_rows, in_features, widths, max_rank=max_rank)
    expected = rows.reference()
    before = rows.y.clone()
    add_adapters_on_cuda(*rows)
    torch.testing.assert_close(rows.y, expected, atol=1e-4, rtol=1e-5)
    none = rows.slots[:, 0] < 0
    assert torch.equal(rows.y[none], before[none])


def test_rows_of_the_result_may_be_rows_of_a_wider_matrix() -> None:
    rows = make_rows(5, 6, 64, (48, 16))
    expected = rows.reference()
    wide = torch.zeros(6, 100)
    wide[:, :64] = rows.y
    add_adapters_on_cuda(wide[:, :64], *rows[1:])
    torch.testing.assert_close(wide[:, :64], expected, atol=1e-4, rtol=1e-5)
    assert not wide[:, 64:].any()
