"""`ostinato::add_adapters` adds low-rank adapters to a linear layer's result (LoRA,
arXiv:2106.09685).

Each row of a step has its own adapter, or none. The adapters of a layer are slots of a few tensors
whose addresses do not change. So captured programs read what was loaded last.

The kernels compute in float32 and round once. The bits of a row depend on its own adapter only.
They are ops/native/adapters/add_adapters.cpp on CPUs, and triton_adapters.py on GPUs.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import pad

from ostinato.ops.register import register_op

__all__ = (
    "PANEL",
    "add_adapters",
    "add_adapters_reference",
    "pack_columns",
)

PANEL = 64  # columns of B that are stored together; a step of few rows reads them as one stream


def add_adapters(
    y: Tensor,
    x: Tensor,
    slots: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    bounds: Tensor,
) -> None:
    """Add scale * B (A x) of each row's adapter to that row of `y`.

    A layer can stack several projections of one input, for example queries, keys and values. Each
    of them has its own rank, scale and A. Rows with a negative slot are not touched.

    Args:
        y: [T, N], the layer's result, in x's dtype or float32; rows contiguous. It is changed.
        x: [T, K], the layer's input: float32, bfloat16 or float16; rows contiguous.
        slots: [T, 1] int32, the slot of each row's adapter; negative = none.
        a: [L, n, R, K] in x's dtype, contiguous: L slots, n projections, R = the largest rank.
        b: [L, ceil(N / PANEL), R, PANEL] in x's dtype, contiguous: the transposed B of all
            projections, from `pack_columns`.
        ranks: [L, n] int32, the ranks of the projections; 0 = not adapted.
        scales: [L, n] float32.
        bounds: [n + 1] int32: projection i has columns bounds[i] to bounds[i + 1] of y.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or a slot is not below L. Checked on
            CPUs only.
    """
    _add_adapters(y, x, slots, a, b, ranks, scales, bounds)


def pack_columns(b: Tensor) -> Tensor:
    """The transposed B of a layer, [r, N], in the order in which the kernels read it.

    Returns:
        [ceil(N / PANEL), r, PANEL] contiguous. Columns past N are zero.
    """
    rank, columns = b.shape
    padded = pad(b, (0, -columns % PANEL))
    return padded.view(rank, -1, PANEL).transpose(0, 1).contiguous()


def add_adapters_reference(
    y: Tensor,
    x: Tensor,
    slots: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    bounds: Tensor,
) -> None:
    """`add_adapters` in plain torch."""
    columns = bounds.tolist()
    of_rows = slots[:, 0]
    for slot in of_rows.unique().tolist():
        if slot < 0:
            continue
        rows = (of_rows == slot).nonzero()[:, 0]
        for output, rank in enumerate(ranks[slot].tolist()):
            first, stop = columns[output], columns[output + 1]
            hidden = x[rows].float() @ a[slot, output, :rank].float().T * scales[slot, output]
            columns_of_b = b[slot, :, :rank].transpose(0, 1).reshape(rank, b.shape[1] * PANEL)
            added = hidden @ columns_of_b[:, first:stop].float()
            y[rows, first:stop] = (y[rows, first:stop].float() + added).to(y.dtype)


def _on_cuda(*arguments: Tensor) -> None:
    kernels = import_module("ostinato.ops.adapters.triton_adapters")  # needs Triton
    kernels.add_adapters_on_cuda(*arguments)


def _fake(
    y: Tensor,
    x: Tensor,
    slots: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    bounds: Tensor,
) -> None:
    return None


_add_adapters: torch._ops.OpOverload = register_op(
    "add_adapters",
    {"CompositeExplicitAutograd": add_adapters_reference, "CUDA": _on_cuda},
    fake=_fake,
    mutates=("y",),
)
