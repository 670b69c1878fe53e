"""The Triton kernels of `ostinato::state_space`. Not yet verified on hardware.

Three launches: the convolution with SiLU, the recurrence, and the gated norm. What is between them
is float32. The recurrence takes the tokens of a sequence one after the other. A program keeps
BLOCK_P rows of a head's state in registers. The rows of a state do not depend on each other.

The constants depend on the sizes of a layer alone. So each sum has one order, and the bits of a
sequence do not depend on chunks or on other sequences.

The names of dimensions are those of `state_space`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.recurrent.triton_convolution import (
    check_layout,
    convolution_constants,
    convolve_tile,
    keep_inputs,
    num_row_tiles,
    sequence_part,
    silu_of,
    softplus_of,
    step_slots,
    tile_of_sequence,
)

__all__ = (
    "Sizes",
    "space_inputs_constants",
    "space_inputs_kernel",
    "space_norm_constants",
    "space_norm_kernel",
    "state_space_constants",
    "state_space_kernel",
    "state_space_on_cuda",
)

_BLOCK_C = 128  # channels of a program of `space_inputs_kernel`
# A program of the recurrence is one warp, which needs no barriers between the tokens. It has 32
# elements of the state in the registers of each thread.
_BLOCK_P = 8  # rows of a state in one program, unless N is more than 128
_STATE_ELEMENTS = 1024
_NORM_ELEMENTS = 512  # of a warp of `space_norm_kernel`
# These tensors are slices of one buffer, with any alignment.
_UNALIGNED = ["query_start_loc", "state_slots"]


@triton.jit
def _write_factors(
    dt,  # [T, H]
    a_log, dt_bias, factors, row, end, stride,
    H: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The factors of a tile's rows for all heads."""
    head = tl.arange(0, BLOCK_H)
    is_stored = (row < end)[:, None] & (head < H)[None, :]
    place = dt + row[:, None].to(tl.int64) * stride + head[None, :]
    x = tl.load(place, mask=is_stored, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=head < H, other=0.0))
    bias = tl.load(dt_bias + head, mask=head < H, other=0.0)
    step = softplus_of(x + bias[None, :])
    step = tl.minimum(tl.maximum(step, LEAST), LARGEST)
    target = factors + row[:, None].to(tl.int64) * (2 * H) + head[None, :]
    tl.store(target, tl.exp(-rate[None, :] * step), mask=is_stored)
    tl.store(target + H, step, mask=is_stored)


@triton.jit(do_not_specialize=["num_seqs", "num_rows"], do_not_specialize_on_alignment=_UNALIGNED)
def space_inputs_kernel(
    projected,  # [T, I + C + H]
    conv_weight,  # [C, WIDTH]
    conv_bias,  # [C] or None
    a_log,  # [H] float32
    dt_bias,  # [H] float32
    conv_state,  # [slots, WIDTH - 1, C]
    query_start_loc,  # [S + 1] int32
    state_slots,  # [S, 4] int32
    mixed,  # [T, C] float32: x, B and C after the convolution
    factors,  # [T, 2 * H] float32: the head's share of the state that is kept, and its step d
    num_seqs,
    num_rows,
    x_stride,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 - the name of the dimension
    C: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,  # power of two, at least WIDTH - 1
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two, at least H
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program for a tile of rows and a block of channels, and one more for all factors."""
    seq, begin, end, first = tile_of_sequence(query_start_loc, num_seqs, num_rows, BLOCK_T, BLOCK_S)
    row = first + tl.arange(0, BLOCK_T)
    if (seq < num_seqs) & (first < end):
        if tl.program_id(1) * BLOCK_C >= C:
            dt = projected + (I + C)
            _write_factors(
                dt, a_log, dt_bias, factors, row, end, x_stride, H, LEAST, LARGEST, BLOCK_H
            )
        else:
            channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
            is_channel = channel < C
            read, _, _, _ = step_slots(state_slots, seq)
            x = convolve_tile(
                projected, conv_weight, conv_bias, conv_state, read, begin, end, row, channel,
                is_channel, x_stride, C, I, 0, WIDTH,
            )  # fmt: skip
            is_stored = (row < end)[:, None] & is_channel[None, :]
            target = mixed + row[:, None].to(tl.int64) * C + channel[None, :]
            tl.store(target, silu_of(x), mask=is_stored)
            if first == begin:
                keep_inputs(
                    projected, conv_state, state_slots, seq, begin, end, channel, is_channel,
                    x_stride, C, I, 0, WIDTH, BLOCK_W,
                )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def state_space_kernel(
    mixed,  # [T, H * P + 2 * G * N] float32
    factors,  # [T, 2 * H] float32
    skip,  # [H] float32
    state,  # [slots, H, P, N] float32
    query_start_loc,  # [S + 1] int32
    state_slots,  # [S, 4] int32
    outputs,  # [T, H * P] float32
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,  # power of two, at least N
    STAGES: tl.constexpr,  # tokens that are read ahead
):
    """One program for a sequence, a head and a block of rows of its state."""
    seq, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start_loc + seq), tl.load(query_start_loc + seq + 1)
    if begin < end:
        read, write, checkpoint, num_tokens = step_slots(state_slots, seq)
        p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
        is_p, is_n = p < P, n < N
        place = state + (head * P + p[:, None]) * N + n[None, :]
        size: tl.constexpr = H * P * N
        is_read = (p < tl.where(read != 0, P, 0))[:, None] & is_n[None, :]
        current = tl.load(place + read * size, mask=is_read, other=0.0)
        through = tl.load(skip + head)
        group = H * P + head // (H // G) * N + n
        for number in range(2):  # the rows before the checkpoint, and those after it
            first, stop, slot, is_written = sequence_part(
                begin, end, write, checkpoint, num_tokens, number
            )
            for row in tl.range(first, stop, num_stages=STAGES):
                inputs = mixed + tl.cast(row, tl.int64) * (H * P + 2 * G * N)
                x = tl.load(inputs + head * P + p, mask=is_p, other=0.0)
                b = tl.load(inputs + group, mask=is_n, other=0.0)
                c = tl.load(inputs + G * N + group, mask=is_n, other=0.0)
                scales = factors + tl.cast(row, tl.int64) * (2 * H) + head
                added = (tl.load(scales + H) * x)[:, None] * b[None, :]
                current = current * tl.load(scales) + added
                result = tl.sum(current * c[None, :], 1) + through * x
                tl.store(outputs + (tl.cast(row, tl.int64) * H + head) * P + p, result, mask=is_p)
            is_stored = (p < tl.where(is_written, P, 0))[:, None] & is_n[None, :]
            tl.store(place + slot * size, current, mask=is_stored)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["query_start_loc"])
def space_norm_kernel(
    outputs,  # [T, I] float32
    projected,  # [T, at least I]; the first I columns are the gates z
    norm_weight,  # [I]
    query_start_loc,  # [S + 1] int32
    out,  # [T, I]
    num_seqs,
    x_stride,
    EPS: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 - the name of the dimension
    G: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least I / G
):
    """One program for a row and a group of heads; rows of padding become zero."""
    row, size = tl.program_id(0).to(tl.int64), I // G
    inside = tl.arange(0, BLOCK) < size
    column = tl.program_id(1) * size + tl.arange(0, BLOCK)
    num_columns = tl.where(row < tl.load(query_start_loc + num_seqs), size, 0)
    is_used = tl.arange(0, BLOCK) < num_columns
    y = tl.load(outputs + row * I + column, mask=is_used, other=0.0)
    z = tl.load(projected + row * x_stride + column, mask=is_used, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + column, mask=is_used, other=0.0).to(tl.float32)
    y = y * silu_of(z)
    y = y * tl.rsqrt(tl.sum(y * y) / size + EPS) * weight
    tl.store(
        out + row * I + column, tl.where(is_used, y, 0.0).to(out.dtype.element_ty), mask=inside
    )


class Sizes(NamedTuple):
    """The sizes of a layer."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.num_groups * self.state_size


def space_inputs_constants(
    sizes: Sizes, width: int, least_step: float, largest_step: float
) -> dict[str, Any]:
    """The constants of `space_inputs_kernel`."""
    return {
        "H": sizes.num_heads,
        "I": sizes.inner,
        "C": sizes.channels,
        "LEAST": least_step,
        "LARGEST": largest_step,
        "BLOCK_C": min(_BLOCK_C, triton.next_power_of_2(sizes.channels)),
        "BLOCK_H": triton.next_power_of_2(sizes.num_heads),
        "num_warps": 4,
        **convolution_constants(width),
    }


def state_space_constants(sizes: Sizes) -> dict[str, Any]:
    """The constants of `state_space_kernel`."""
    block_n = triton.next_power_of_2(sizes.state_size)
    most_rows = max(1, min(_BLOCK_P, _STATE_ELEMENTS // block_n))
    return {
        "H": sizes.num_heads,
        "P": sizes.head_dim,
        "G": sizes.num_groups,
        "N": sizes.state_size,
        "BLOCK_P": min(most_rows, triton.next_power_of_2(sizes.head_dim)),
        "BLOCK_N": block_n,
        "STAGES": 3,
        "num_warps": 1,
    }


def space_norm_constants(sizes: Sizes, eps: float) -> dict[str, Any]:
    """The constants of `space_norm_kernel`."""
    block = triton.next_power_of_2(sizes.inner // sizes.num_groups)
    return {
        "EPS": eps,
        "I": sizes.inner,
        "G": sizes.num_groups,
        "BLOCK": block,
        "num_warps": min(max(block // _NORM_ELEMENTS, 1), 16),
    }


def state_space_on_cuda(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    num_groups: int,
    norm_eps: float,
    least_step: float,
    largest_step: float,
) -> Tensor:
    """`state_space` (ops/recurrent/state_space.py) by three launches; slots are not checked.

    Raises:
        ValueError: the rows of `projected`, or another tensor, are not contiguous.
    """
    whole: dict[str, Tensor | None] = {"conv_weight": conv_weight, "conv_bias": conv_bias}
    whole |= {"a_log": a_log, "dt_bias": dt_bias, "skip": skip, "norm_weight": norm_weight}
    whole |= {"conv_state": conv_state, "state": state}
    whole |= {"query_start_loc": query_start_loc, "state_slots": state_slots}
    check_layout("state_space", {"projected": projected}, whole)
    num_rows, num_seqs = len(projected), len(state_slots)
    _, num_heads, head_dim, state_size = state.shape
    sizes = Sizes(num_heads, head_dim, num_groups, state_size)
    out = projected.new_empty(num_rows, sizes.inner)
    if not num_rows:
        return out
    mixed = projected.new_empty((num_rows, sizes.channels), dtype=torch.float32)
    factors = projected.new_empty((num_rows, 2 * num_heads), dtype=torch.float32)
    outputs = projected.new_empty((num_rows, sizes.inner), dtype=torch.float32)
    inputs = space_inputs_constants(sizes, conv_weight.shape[1], least_step, largest_step)
    blocks = triton.cdiv(sizes.channels, inputs["BLOCK_C"])
    space_inputs_kernel[(num_row_tiles(num_seqs, num_rows), blocks + 1)](
        projected,
        conv_weight,
        conv_bias,
        a_log,
        dt_bias,
        conv_state,
        query_start_loc,
        state_slots,
        mixed,
        factors,
        num_seqs,
        num_rows,
        projected.stride(0),
        **inputs,
    )
    constants = state_space_constants(sizes)
    state_space_kernel[(num_seqs, num_heads, triton.cdiv(head_dim, constants["BLOCK_P"]))](
        mixed, factors, skip, state, query_start_loc, state_slots, outputs, **constants
    )
    norm = space_norm_constants(sizes, norm_eps)
    space_norm_kernel[(num_rows, num_groups)](
        outputs,
        projected,
        norm_weight,
        query_start_loc,
        out,
        num_seqs,
        projected.stride(0),
        **norm,
    )
    return out
