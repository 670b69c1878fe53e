"""Stored matrices that are stacked in another order than that in which they are loaded."""

from __future__ import annotations

import torch

from ostinato.models.quantized_checkpoints.packed_integers import PackedIntegers
from ostinato.models.sharding import Span
from ostinato.models.weight_methods.weight_method import MatrixSpec, Part

SIZES, COLUMNS = (40, 20, 8), 64


def test_the_order_of_rows_counts_and_not_the_order_of_loading() -> None:
    """Three matrices are loaded from the last rows to the first, and share panels of 32 rows."""
    method = PackedIntegers(bits=8, group_size=32, symmetric=False, is_packed=False)
    generator = torch.Generator().manual_seed(1)
    stored = [
        {
            "weight": torch.randint(-128, 128, (rows, COLUMNS), generator=generator).to(torch.int8),
            "weight_scale": torch.rand(rows, 2, generator=generator).to(torch.float16) + 0.1,
            "weight_zero_point": torch.randint(-9, 9, (rows, 2), generator=generator).to(
                torch.int8
            ),
        }
        for rows in SIZES
    ]
    spec = MatrixSpec(sum(SIZES), COLUMNS, torch.float32, torch.device("cpu"))
    columns = Span(0, COLUMNS, COLUMNS)
    reversed_parts, last = {}, sum(SIZES)
    for index, (rows, tensors) in enumerate(zip(SIZES, stored, strict=True)):
        last -= rows
        part = Part(index, 3, (rows, COLUMNS), slice(0, rows), columns, last, rows)
        for name, value in tensors.items():
            method.load(reversed_parts, name, value, part, spec)
    whole = {}
    part = Part(0, 1, (sum(SIZES), COLUMNS), slice(0, sum(SIZES)), columns, 0, sum(SIZES))
    for name in stored[0]:
        stacked = torch.cat([tensors[name] for tensors in reversed(stored)])
        method.load(whole, name, stacked, part, spec)
    expected = method.finish(whole, spec)["weight"]
    assert torch.equal(method.finish(reversed_parts, spec)["weight"], expected)
    for found, one in zip(
        method.unpacked(reversed_parts, spec), method.unpacked(whole, spec), strict=True
    ):
        assert torch.equal(found, one)
