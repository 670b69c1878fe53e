"""The Triton kernels that draw tokens which need no order of the vocabulary: greedy and full draws.

A full draw inverts the cumulative distribution, in the order of token ids. The vocabulary is read
once. The first kernel computes for each part of a row its largest logit and the sum of its weights.
A weight is a whole number of units of 2**-40 of the part's largest weight. So sums do not depend on
the order of their terms. The second kernel finds the part in which the draw falls, and reads this
part again to find the token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ("draw_kernel", "draw_unsorted", "parts_kernel")

_CONSTANTS: dict[str, Any] = {"PART": 4096, "num_warps": 8}  # a part has PART tokens
_LOG2_E = tl.constexpr(1.4426950408889634)
_UNITS = tl.constexpr(1099511627776.0)  # 2**40
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _load_logits(row, token, vocab_size):
    """Logits of these tokens; -inf for NaN and for tokens outside of the vocabulary."""
    values = tl.load(row + token, mask=token < vocab_size, other=_NEVER)
    return tl.where(values == values, values, _NEVER)


@triton.jit
def _weights(values, most, scale):
    """int64 weights relative to the largest logit `most`; 0 for tokens that are impossible."""
    below = tl.where(values == most, 0.0, values - most)
    weights = tl.exp2(below * scale) * _UNITS
    return tl.where(values > _NEVER, weights, 0.0).to(tl.int64)


@triton.jit(do_not_specialize=["vocab_size"])
def parts_kernel(
    highest,  # [R, parts] float32, the largest logit of each part
    likeliest,  # [R, parts] int32, the first token that has it
    sums,  # [R, parts] int64, the sum of the weights
    logits,  # [R, V] float32
    temperatures,  # [R] float64
    row_stride,
    vocab_size,
    PART: tl.constexpr,
):
    """One program for each row and part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    values = _load_logits(logits + row * row_stride, token, vocab_size)
    most, place = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    scale = (1.0 / tl.load(temperatures + row) * _LOG2_E).to(tl.float32)
    target = row * tl.num_programs(1) + part
    tl.store(highest + target, most)
    tl.store(likeliest + target, part * PART + place)
    tl.store(sums + target, tl.sum(_weights(values, most, scale), 0))


@triton.jit(do_not_specialize=["vocab_size", "num_parts"])
def draw_kernel(
    token_ids,  # [R] int64
    highest,  # [R, parts] float32
    likeliest,  # [R, parts] int32
    sums,  # [R, parts] int64
    logits,  # [R, V] float32
    paths,  # [R] float64; 0 = greedy
    temperatures,  # [R] float64
    uniforms,  # [R] float64 in [0, 1)
    row_stride,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, at least `num_parts`
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    known = part < num_parts
    mosts = tl.load(highest + row * num_parts + part, mask=known, other=_NEVER)
    most, first = tl.max(mosts, 0, return_indices=True, return_indices_tie_break_left=True)
    drawn = tl.load(likeliest + row * num_parts + first)
    if tl.load(paths + row) != 0.0:
        scale = (1.0 / tl.load(temperatures + row) * _LOG2_E).to(tl.float32)
        below = tl.where(mosts == most, 0.0, mosts - most).to(tl.float64)
        factors = tl.where(mosts > _NEVER, tl.exp2(below * scale), 0.0)
        counts = tl.load(sums + row * num_parts + part, mask=known, other=0)
        masses = counts.to(tl.float64) * factors
        cumulative = tl.cumsum(masses, 0)
        drawn_mass = tl.load(uniforms + row) * tl.sum(masses, 0)
        # A part without mass is not chosen, although prefix sums are rounded.
        last = tl.max(tl.where(masses > 0.0, part, 0), 0)
        beyond = (masses > 0.0) & (cumulative > drawn_mass)
        chosen = tl.minimum(tl.min(tl.where(beyond, part, PARTS), 0), last)
        is_chosen = part == chosen
        before = tl.sum(tl.where(is_chosen, cumulative - masses, 0.0), 0)
        factor = tl.sum(tl.where(is_chosen, factors, 0.0), 0)
        most_units = tl.sum(tl.where(is_chosen, counts - 1, 0), 0)
        rest = ((drawn_mass - before) / tl.maximum(factor, 1e-300)).to(tl.int64)
        rest = tl.maximum(tl.minimum(rest, most_units), 0)
        token = chosen * PART + tl.arange(0, PART)
        values = _load_logits(logits + row * row_stride, token, vocab_size)
        peak = tl.sum(tl.where(is_chosen & known, tl.where(mosts > _NEVER, mosts, 0.0), 0.0), 0)
        running = tl.cumsum(_weights(values, peak, scale), 0)
        found = chosen * PART + tl.sum((running <= rest).to(tl.int32), 0)
        drawn = tl.where(most > _NEVER, found, drawn)
    tl.store(token_ids + row, drawn.to(tl.int64))


def draw_unsorted(logits: Tensor, paths: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """The likeliest token of each greedy row, and a token of the whole vocabulary for other rows.

    Args:
        logits: [R, V] float32, rows contiguous, -inf = impossible. A NaN counts as -inf.
        paths: [R] float64, 0 = greedy.
        temperatures: [R] float64 above 0.
        uniforms: [R] float64 in [0, 1).

    Returns:
        [R] int64 token ids; 0 for a row whose tokens are all impossible.

    Raises:
        ValueError: the dtype of the logits or their strides are not as above.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(
            f"draw_unsorted: logits must be float32 with contiguous rows, got {logits.dtype} with "
            f"strides {logits.stride()}"
        )
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _CONSTANTS["PART"])
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    highest = logits.new_empty(num_rows, num_parts)
    likeliest = token_ids.new_empty((num_rows, num_parts), dtype=torch.int32)
    sums = token_ids.new_empty((num_rows, num_parts))
    if num_rows == 0:
        return token_ids
    stride = logits.stride(0)
    constants: dict[str, Any] = {**_CONSTANTS, "PARTS": triton.next_power_of_2(num_parts)}
    parts_kernel[(num_rows, num_parts)](
        highest, likeliest, sums, logits, temperatures, stride, vocab_size, **_CONSTANTS
    )
    draw_kernel[(num_rows,)](
        token_ids,
        highest,
        likeliest,
        sums,
        logits,
        paths,
        temperatures,
        uniforms,
        stride,
        vocab_size,
        num_parts,
        **constants,
    )
    return token_ids
