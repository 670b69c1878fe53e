"""The Triton kernel of `ostinato::gated_short_conv`. Not yet verified on hardware."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.recurrent.triton_convolution import (
    check_layout,
    convolution_constants,
    convolve_tile,
    keep_inputs,
    num_row_tiles,
    step_slots,
    tile_of_sequence,
)

__all__ = ("short_conv_constants", "short_conv_kernel", "short_conv_on_cuda")

_BLOCK_C = 128  # channels of a program


@triton.jit(
    do_not_specialize=["num_seqs", "num_rows"],
    # These tensors are slices of one buffer, with any alignment.
    do_not_specialize_on_alignment=["query_start_loc", "state_slots"],
)
def short_conv_kernel(
    bcx,  # [T, 3 C]
    conv_weight,  # [C, WIDTH]
    conv_bias,  # [C] or None
    conv_state,  # [slots, WIDTH - 1, C]
    query_start_loc,  # [S + 1] int32
    state_slots,  # [S, 4] int32
    out,  # [T, C]
    num_seqs,
    num_rows,
    x_stride,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,  # power of two, at least WIDTH - 1
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program for a tile of a sequence's rows and a block of channels."""
    seq, begin, end, first = tile_of_sequence(query_start_loc, num_seqs, num_rows, BLOCK_T, BLOCK_S)
    if first < end:
        row = first + tl.arange(0, BLOCK_T)
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        is_channel = channel < C
        is_stored = (row < end)[:, None] & is_channel[None, :]
        target = out + row[:, None].to(tl.int64) * C + channel[None, :]
        if seq == num_seqs:
            tl.store(target, tl.zeros([BLOCK_T, BLOCK_C], out.dtype.element_ty), mask=is_stored)
        else:
            read, _, _, _ = step_slots(state_slots, seq)
            mixed = convolve_tile(
                bcx, conv_weight, conv_bias, conv_state, read, begin, end, row, channel,
                is_channel, x_stride, C, 0, 2 * C, WIDTH,
            )  # fmt: skip
            source = bcx + row[:, None].to(tl.int64) * x_stride + C + channel[None, :]
            c = tl.load(source, mask=is_stored, other=0.0).to(tl.float32)
            tl.store(target, (c * mixed).to(out.dtype.element_ty), mask=is_stored)
            if first == begin:
                keep_inputs(
                    bcx, conv_state, state_slots, seq, begin, end, channel, is_channel, x_stride,
                    C, 0, 2 * C, WIDTH, BLOCK_W,
                )  # fmt: skip


def short_conv_constants(channels: int, width: int) -> dict[str, Any]:
    """The kernel's constants."""
    return {
        "C": channels,
        "BLOCK_C": min(_BLOCK_C, triton.next_power_of_2(channels)),
        "num_warps": 4,
        **convolution_constants(width),
    }


def short_conv_on_cuda(
    bcx: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """`gated_short_conv` (ops/recurrent/short_conv.py) by one launch; slots are not checked.

    Raises:
        ValueError: the rows of bcx or another tensor are not contiguous.
    """
    whole = {"conv_weight": conv_weight, "conv_bias": conv_bias, "conv_state": conv_state}
    whole |= {"query_start_loc": query_start_loc, "state_slots": state_slots}
    check_layout("gated_short_conv", {"bcx": bcx}, whole)
    channels, width = conv_weight.shape
    num_rows, num_seqs = len(bcx), len(state_slots)
    out = bcx.new_empty(num_rows, channels)
    if num_rows:
        constants = short_conv_constants(channels, width)
        short_conv_kernel[
            (num_row_tiles(num_seqs, num_rows), triton.cdiv(channels, constants["BLOCK_C"]))
        ](
            bcx,
            conv_weight,
            conv_bias,
            conv_state,
            query_start_loc,
            state_slots,
            out,
            num_seqs,
            num_rows,
            bcx.stride(0),
            **constants,
        )
    return out
