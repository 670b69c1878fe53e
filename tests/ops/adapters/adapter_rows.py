"""Random layers with adapters, for tests of `add_adapters`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.adapters.add_adapters import add_adapters_reference, pack_columns

__all__ = ("Rows", "make_rows")


class Rows(NamedTuple):
    """The arguments of `add_adapters`."""

    y: Tensor
    x: Tensor
    slots: Tensor
    a: Tensor
    b: Tensor
    ranks: Tensor
    scales: Tensor
    bounds: Tensor

    def reference(self) -> Tensor:
        """y as the plain torch code changes it."""
        y = self.y.clone()
        add_adapters_reference(y, *self[1:])
        return y

    def row(self, index: int) -> Rows:
        """The arguments with this row alone."""
        y, x, slots = (tensor[index : index + 1].clone() for tensor in self[:3])
        return Rows(y, x, slots, *self[3:])


def make_rows(
    seed: int,
    num_rows: int,
    in_features: int,
    widths: tuple[int, ...],
    *,
    max_rank: int = 16,
    num_slots: int = 4,
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> Rows:
    """Rows of which some have no adapter, and adapters that lack some projections.

    Numbers past an adapter's rank are NaN, because no kernel may read them.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    count, total = len(widths), sum(widths)
    ranks = torch.randint(0, max_rank + 1, (num_slots, count), generator=generator)
    a = normal(num_slots, count, max_rank, in_features) / in_features**0.5
    b = normal(num_slots, max_rank, total)
    bounds = [0]
    for output, width in enumerate(widths):
        bounds.append(bounds[-1] + width)
        for slot in range(num_slots):
            rank = int(ranks[slot, output])
            a[slot, output, rank:] = float("nan")
            b[slot, rank:, bounds[-2] : bounds[-1]] = float("nan")
    return Rows(
        normal(num_rows, total).to(out_dtype or dtype),
        normal(num_rows, in_features).to(dtype),
        torch.randint(-1, num_slots, (num_rows, 1), dtype=torch.int32, generator=generator),
        a.to(dtype),
        torch.stack([pack_columns(each) for each in b.to(dtype)]),
        ranks.int(),
        torch.rand(num_slots, count, generator=generator) + 0.5,
        torch.tensor(bounds, dtype=torch.int32),
    )
