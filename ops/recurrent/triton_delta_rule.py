"""The Triton kernels of `ostinato::gated_delta_rule`. Not yet verified on hardware.

Three launches: the convolution with SiLU and the unit norms, the recurrence, and the gated norm.
What is between them is float32. The recurrence takes the tokens of a sequence one after the other.
A program keeps BLOCK_V columns of a head's state in registers. The columns of a state do not depend
on each other.

The constants depend on the sizes of a head alone. So each sum has one order, and the bits of a
sequence do not depend on chunks or on other sequences.

The names of dimensions are those of `gated_delta_rule`.
"""

from __future__ import annotations

from typing import Any

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
    "delta_inputs_constants",
    "delta_inputs_kernel",
    "delta_norm_constants",
    "delta_norm_kernel",
    "delta_rule_constants",
    "delta_rule_kernel",
    "delta_rule_on_cuda",
)

# A program of the recurrence is one warp, which needs no barriers between the tokens. It has 64
# elements of the state in the registers of each thread.
_BLOCK_V = 16  # columns of a state in one program, unless K is more than 128
_STATE_ELEMENTS = 2048
_NORM_ELEMENTS = 1024  # of a program of `delta_norm_kernel`, unless a head has more
# These tensors are slices of one buffer, with any alignment.
_UNALIGNED = ["query_start_loc", "state_slots"]


@triton.jit
def _write_factors(
    gates, a_log, dt_bias, factors, row, end, gates_stride, HV: tl.constexpr, BLOCK_H: tl.constexpr
):
    """The factors of a tile's rows for all heads."""
    head = tl.arange(0, BLOCK_H)
    is_stored = (row < end)[:, None] & (head < HV)[None, :]
    place = gates + row[:, None].to(tl.int64) * gates_stride + head[None, :]
    b = tl.load(place, mask=is_stored, other=0.0).to(tl.float32)
    a = tl.load(place + HV, mask=is_stored, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=head < HV, other=0.0))
    bias = tl.load(dt_bias + head, mask=head < HV, other=0.0)
    kept = tl.exp(-rate[None, :] * softplus_of(a + bias[None, :]))
    target = factors + row[:, None].to(tl.int64) * (2 * HV) + head[None, :]
    tl.store(target, kept, mask=is_stored)
    tl.store(target + HV, 1.0 / (1.0 + tl.exp(-b)), mask=is_stored)


@triton.jit(do_not_specialize=["num_seqs", "num_rows"], do_not_specialize_on_alignment=_UNALIGNED)
def delta_inputs_kernel(
    qkvz,  # [T, C + HV * V]
    gates,  # [T, 2 * HV]
    conv_weight,  # [C, WIDTH]
    a_log,  # [HV] float32
    dt_bias,  # [HV] float32
    conv_state,  # [slots, WIDTH - 1, C]
    query_start_loc,  # [S + 1] int32
    state_slots,  # [S, 4] int32
    mixed,  # [T, C] float32: q / sqrt(K), k and v after the convolution
    factors,  # [T, 2 * HV] float32: the head's share of the state that is kept, and sigmoid(b)
    num_seqs,
    num_rows,
    x_stride,
    gates_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,  # power of two, at least WIDTH - 1
    BLOCK_C: tl.constexpr,  # power of two, at least K and V
    BLOCK_H: tl.constexpr,  # power of two, at least HV
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program for a tile of rows and a head of q, k or v, and one more for all factors."""
    seq, begin, end, first = tile_of_sequence(query_start_loc, num_seqs, num_rows, BLOCK_T, BLOCK_S)
    part = tl.program_id(1)
    row = first + tl.arange(0, BLOCK_T)
    if (seq < num_seqs) & (first < end):
        if part == 2 * HK + HV:
            _write_factors(gates, a_log, dt_bias, factors, row, end, gates_stride, HV, BLOCK_H)
        else:
            C: tl.constexpr = 2 * HK * K + HV * V
            is_unit = part < 2 * HK
            size = tl.where(is_unit, K, V)
            inside = tl.arange(0, BLOCK_C)
            is_channel = inside < size
            channel = tl.where(is_unit, part * K, 2 * HK * K + (part - 2 * HK) * V) + inside
            read, _, _, _ = step_slots(state_slots, seq)
            x = convolve_tile(
                qkvz, conv_weight, None, conv_state, read, begin, end, row, channel, is_channel,
                x_stride, C, 0, 0, WIDTH,
            )  # fmt: skip
            x = silu_of(x)
            scale = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)  # as in delta_rule.py
            root: tl.constexpr = K**-0.5
            scale = tl.where(part < HK, scale * root, tl.where(is_unit, scale, 1.0))
            is_stored = (row < end)[:, None] & is_channel[None, :]
            target = mixed + row[:, None].to(tl.int64) * C + channel[None, :]
            tl.store(target, x * scale[:, None], mask=is_stored)
            if first == begin:
                keep_inputs(
                    qkvz, conv_state, state_slots, seq, begin, end, channel, is_channel, x_stride,
                    C, 0, 0, WIDTH, BLOCK_W,
                )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def delta_rule_kernel(
    mixed,  # [T, C] float32
    factors,  # [T, 2 * HV] float32
    state,  # [slots, HV, K, V] float32
    query_start_loc,  # [S + 1] int32
    state_slots,  # [S, 4] int32
    outputs,  # [T, HV * V] float32
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two, at least K
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,  # tokens that are read ahead
):
    """One program for a sequence, a value head and a block of columns of its state."""
    seq, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start_loc + seq), tl.load(query_start_loc + seq + 1)
    if begin < end:
        read, write, checkpoint, num_tokens = step_slots(state_slots, seq)
        k, v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_k, is_v = k < K, v < V
        place = state + (head * K + k[:, None]) * V + v[None, :]
        size: tl.constexpr = HV * K * V
        is_read = (k < tl.where(read != 0, K, 0))[:, None] & is_v[None, :]
        current = tl.load(place + read * size, mask=is_read, other=0.0)
        C: tl.constexpr = 2 * HK * K + HV * V
        key = head // (HV // HK) * K + k
        for number in range(2):  # the rows before the checkpoint, and those after it
            first, stop, slot, is_written = sequence_part(
                begin, end, write, checkpoint, num_tokens, number
            )
            for row in tl.range(first, stop, num_stages=STAGES):
                inputs = mixed + tl.cast(row, tl.int64) * C
                q = tl.load(inputs + key, mask=is_k, other=0.0)
                unit = tl.load(inputs + HK * K + key, mask=is_k, other=0.0)
                value = tl.load(inputs + 2 * HK * K + head * V + v, mask=is_v, other=0.0)
                scales = factors + tl.cast(row, tl.int64) * (2 * HV) + head
                current = current * tl.load(scales)
                found = tl.sum(unit[:, None] * current, 0)
                delta = tl.load(scales + HV) * (value - found)
                current = current + unit[:, None] * delta[None, :]
                result = tl.sum(q[:, None] * current, 0)
                tl.store(outputs + (tl.cast(row, tl.int64) * HV + head) * V + v, result, mask=is_v)
            is_stored = (k < tl.where(is_written, K, 0))[:, None] & is_v[None, :]
            tl.store(place + slot * size, current, mask=is_stored)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["query_start_loc"])
def delta_norm_kernel(
    outputs,  # [T, HV * V] float32
    qkvz,  # [T, Z + HV * V]
    norm_weight,  # [V]
    query_start_loc,  # [S + 1] int32
    out,  # [T, HV * V]
    num_seqs,
    x_stride,
    EPS: tl.constexpr,
    Z: tl.constexpr,  # the column of qkvz with the first gate z
    HV: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,  # power of two, at least V
):
    """One program for a row and BLOCK_H heads; rows of padding become zero."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = tl.arange(0, BLOCK_V)
    inside = (head < HV)[:, None] & (v < V)[None, :]
    num_heads = tl.where(row < tl.load(query_start_loc + num_seqs), HV, 0)
    is_used = (head < num_heads)[:, None] & (v < V)[None, :]
    place = head[:, None] * V + v[None, :]
    x = tl.load(outputs + row * (HV * V) + place, mask=is_used, other=0.0)
    z = tl.load(qkvz + row * x_stride + Z + place, mask=is_used, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + v, mask=v < V, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / V + EPS)[:, None]
    result = tl.where(is_used, x * weight[None, :] * silu_of(z), 0.0)
    tl.store(out + row * (HV * V) + place, result.to(out.dtype.element_ty), mask=inside)


def delta_inputs_constants(
    num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, width: int
) -> dict[str, Any]:
    """The constants of `delta_inputs_kernel`."""
    return {
        "HK": num_k_heads,
        "HV": num_v_heads,
        "K": k_dim,
        "V": v_dim,
        "BLOCK_C": triton.next_power_of_2(max(k_dim, v_dim)),
        "BLOCK_H": triton.next_power_of_2(num_v_heads),
        "num_warps": 4,
        **convolution_constants(width),
    }


def delta_rule_constants(
    num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int
) -> dict[str, Any]:
    """The constants of `delta_rule_kernel`."""
    block_k = triton.next_power_of_2(k_dim)
    most_columns = max(1, min(_BLOCK_V, _STATE_ELEMENTS // block_k))
    return {
        "HK": num_k_heads,
        "HV": num_v_heads,
        "K": k_dim,
        "V": v_dim,
        "BLOCK_K": block_k,
        "BLOCK_V": min(most_columns, triton.next_power_of_2(v_dim)),
        "STAGES": 3,
        "num_warps": 1,
    }


def delta_norm_constants(
    num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, eps: float
) -> dict[str, Any]:
    """The constants of `delta_norm_kernel`."""
    block_v = triton.next_power_of_2(v_dim)
    most_heads = max(1, _NORM_ELEMENTS // block_v)
    return {
        "EPS": eps,
        "Z": 2 * num_k_heads * k_dim + num_v_heads * v_dim,
        "HV": num_v_heads,
        "V": v_dim,
        "BLOCK_H": min(most_heads, triton.next_power_of_2(num_v_heads)),
        "BLOCK_V": block_v,
        "num_warps": 4,
    }


def delta_rule_on_cuda(
    qkvz: Tensor,
    gates: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    num_k_heads: int,
    norm_eps: float,
) -> Tensor:
    """`gated_delta_rule` (ops/recurrent/delta_rule.py) by three launches; slots are not checked.

    Raises:
        ValueError: the rows of qkvz or gates, or another tensor, are not contiguous.
    """
    whole: dict[str, Tensor | None] = {"conv_weight": conv_weight, "a_log": a_log}
    whole |= {"dt_bias": dt_bias, "norm_weight": norm_weight, "conv_state": conv_state}
    whole |= {"state": state, "query_start_loc": query_start_loc, "state_slots": state_slots}
    check_layout("gated_delta_rule", {"qkvz": qkvz, "gates": gates}, whole)
    num_rows, num_seqs = len(qkvz), len(state_slots)
    _, num_heads, k_dim, v_dim = state.shape
    channels, width = conv_weight.shape
    out = qkvz.new_empty(num_rows, num_heads * v_dim)
    if not num_rows:
        return out
    mixed = qkvz.new_empty((num_rows, channels), dtype=torch.float32)
    factors = qkvz.new_empty((num_rows, 2 * num_heads), dtype=torch.float32)
    outputs = qkvz.new_empty((num_rows, num_heads * v_dim), dtype=torch.float32)
    sizes = (num_k_heads, num_heads, k_dim, v_dim)
    delta_inputs_kernel[(num_row_tiles(num_seqs, num_rows), 2 * num_k_heads + num_heads + 1)](
        qkvz,
        gates,
        conv_weight,
        a_log,
        dt_bias,
        conv_state,
        query_start_loc,
        state_slots,
        mixed,
        factors,
        num_seqs,
        num_rows,
        qkvz.stride(0),
        gates.stride(0),
        **delta_inputs_constants(*sizes, width),
    )
    constants = delta_rule_constants(*sizes)
    delta_rule_kernel[(num_seqs, num_heads, triton.cdiv(v_dim, constants["BLOCK_V"]))](
        mixed, factors, state, query_start_loc, state_slots, outputs, **constants
    )
    norm = delta_norm_constants(*sizes, norm_eps)
    delta_norm_kernel[(num_rows, triton.cdiv(num_heads, norm["BLOCK_H"]))](
        outputs,
        qkvz,
        norm_weight,
        query_start_loc,
        out,
        num_seqs,
        qkvz.stride(0),
        **norm,
    )
    return out
