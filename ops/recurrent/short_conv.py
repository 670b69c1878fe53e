"""The op `ostinato::gated_short_conv`: the mixer of LFM2's convolution layers (arXiv:2511.23404).

Shapes: T tokens of a step, S sequences, C channels, W the width of the convolution.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ostinato.ops.recurrent.states import convolve, state_rows
from ostinato.ops.register import register_op

__all__ = ("gated_short_conv", "reference_gated_short_conv")


def gated_short_conv(
    bcx: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """c * convolution(b * x), and advance the states of the step's sequences.

    The product b * x is rounded to the dtype of bcx, as it is kept in this dtype. The rest is
    computed in float32 and rounded once.

    Args:
        bcx: [T, 3 C]: b, c and x of a token.
        conv_weight: [C, W]; see `ops.recurrent.states.convolve`.
        conv_bias: [C] or None.
        conv_state: [slots, W - 1, C] in the dtype of bcx, changed.
        query_start_loc: [S + 1] int32, the first row of each sequence, then the total.
        state_slots: [S, 4] int32; see the columns in `ops.recurrent.states`.

    Returns:
        [T, C] contiguous, in the dtype of bcx. Rows of padding are zero.

    Raises:
        ValueError: the CPU kernel refused a shape, a dtype or a slot; or a CUDA kernel refused
            strides.
    """
    return _op(bcx, conv_weight, conv_bias, conv_state, query_start_loc, state_slots)


def reference_gated_short_conv(
    bcx: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """`gated_short_conv` in torch operations."""
    b, c, x = bcx.chunk(3, 1)
    products = (b * x).float()
    out = torch.zeros_like(b, memory_format=torch.contiguous_format)
    for sequence in state_rows(query_start_loc, state_slots):
        earlier = conv_state[sequence.read].float()
        if not sequence.read:
            earlier = torch.zeros_like(earlier)
        for begin, end, slot in sequence.parts():
            mixed, earlier = convolve(products[begin:end], conv_weight, conv_bias, earlier)
            out[begin:end] = (c[begin:end].float() * mixed).to(out.dtype)
            conv_state[slot] = earlier.to(conv_state.dtype)
    return out


def _on_cuda(*arguments: Any) -> Tensor:
    kernels = import_module("ostinato.ops.recurrent.triton_short_conv")  # needs Triton
    return kernels.short_conv_on_cuda(*arguments)


def _fake(
    bcx: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
) -> Tensor:
    return bcx.new_empty(bcx.shape[0], bcx.shape[1] // 3)


_op = register_op(
    "gated_short_conv",
    {"CompositeExplicitAutograd": reference_gated_short_conv, "CUDA": _on_cuda},
    fake=_fake,
    mutates=("conv_state",),
)
