"""Adds rows of a table to the rows of a matrix.

On a CPU this is one op, so that a layer that calls it needs no compiler. On other devices it is
plain torch, which Inductor fuses with its neighbours.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.register import by_device, register_op

__all__ = ("add_table_rows",)


def add_table_rows(x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """`x + table[rows]`.

    Args:
        x: [T, D].
        table: [N, D], of x's dtype.
        rows: [T] int64, each in [0, N).

    Returns:
        [T, D] contiguous.
    """
    return _add_table_rows(x, table, rows)


def _plain_add_table_rows(x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    return x + F.embedding(rows, table)


def _add_table_rows_fake(x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_add_table_rows = by_device(
    register_op(
        "add_table_rows",
        {"CompositeExplicitAutograd": _plain_add_table_rows},
        fake=_add_table_rows_fake,
    ),
    _plain_add_table_rows,
)
