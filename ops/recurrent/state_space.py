"""The op `ostinato::state_space`: the mixer of a Mamba-2 layer, without its projections.

The recurrence is that of state space duality (arXiv:2405.21060).

Shapes: T tokens of a step, S sequences, H heads of size P, G groups of heads, N the size of a
state, I = H P, C = I + 2 G N channels, W the width of the convolution.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.recurrent.states import convolve, silu, state_rows
from ostinato.ops.register import register_op

__all__ = ("reference_state_space", "state_space")


def state_space(
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
    """Advance the states of the step's sequences by their tokens.

    For each token and head, with x, B and C after the convolution and SiLU:

        d = clamp(softplus(dt + dt_bias), least_step, largest_step)
        S = exp(-exp(A) d) S + d x^T B;  y = S C + D x
        result = norm(y * silu(z)) * norm_weight

    The norm is over the values of all heads of a group. All of it is computed in float32 and
    rounded once.

    Args:
        projected: [T, I + C + H]: gates z, then x, B and C, then dt of a token.
        conv_weight: [C, W]; see `ops.recurrent.states.convolve`.
        conv_bias: [C] or None.
        a_log: [H] float32: A.
        dt_bias: [H] float32.
        skip: [H] float32: D.
        norm_weight: [I], of the RMS norm.
        conv_state: [slots, W - 1, C] in the dtype of `projected`, changed.
        state: [slots, H, P, N] float32, changed.
        query_start_loc: [S + 1] int32, the first row of each sequence, then the total.
        state_slots: [S, 4] int32; see the columns in `ops.recurrent.states`.
        num_groups: G.
        norm_eps: added to the mean square.
        least_step: the smallest d.
        largest_step: the largest d; may be infinite.

    Returns:
        [T, I] contiguous, in the dtype of `projected`. Rows of padding are zero.

    Raises:
        ValueError: the CPU kernel refused a shape, a dtype or a slot; or a CUDA kernel refused
            strides.
    """
    return _op(
        projected,
        conv_weight,
        conv_bias,
        a_log,
        dt_bias,
        skip,
        norm_weight,
        conv_state,
        state,
        query_start_loc,
        state_slots,
        num_groups,
        norm_eps,
        least_step,
        largest_step,
    )


def reference_state_space(
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
    """`state_space` in torch operations."""
    _, num_heads, size, num_states = state.shape
    inner, channels = num_heads * size, conv_weight.shape[0]
    out = projected.new_zeros(len(projected), inner)
    steps = F.softplus(projected[:, inner + channels :].float() + dt_bias)
    steps = steps.clamp(least_step, largest_step)
    kept = torch.exp(-torch.exp(a_log) * steps)
    for sequence in state_rows(query_start_loc, state_slots):
        earlier, current = conv_state[sequence.read].float(), state[sequence.read].clone()
        if not sequence.read:
            earlier, current = torch.zeros_like(earlier), torch.zeros_like(current)
        for begin, end, slot in sequence.parts():
            inputs = projected[begin:end, inner : inner + channels].float()
            mixed, earlier = convolve(inputs, conv_weight, conv_bias, earlier)
            x, b, c = silu(mixed).split((inner, *(num_groups * num_states,) * 2), 1)
            x = x.view(-1, num_heads, size)
            b, c = (
                one.view(-1, num_groups, num_states).repeat_interleave(num_heads // num_groups, 1)
                for one in (b, c)
            )
            z = silu(projected[begin:end, :inner])
            for row in range(end - begin):
                new = (steps[begin + row, :, None] * x[row]).unsqueeze(2) * b[row].unsqueeze(1)
                current = current * kept[begin + row, :, None, None] + new
                y = torch.einsum("hpn,hn->hp", current, c[row]) + skip.unsqueeze(1) * x[row]
                y = (y.view(-1) * z[row]).view(num_groups, -1)
                y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm_eps)
                out[begin + row] = (y.view(-1) * norm_weight.float()).to(out.dtype)
            conv_state[slot], state[slot] = earlier.to(conv_state.dtype), current
    return out


def _on_cuda(*arguments: Any) -> Tensor:
    kernels = import_module("ostinato.ops.recurrent.triton_state_space")  # needs Triton
    return kernels.state_space_on_cuda(*arguments)


def _fake(
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
    return projected.new_empty(projected.shape[0], state.shape[1] * state.shape[2])


_op = register_op(
    "state_space",
    {"CompositeExplicitAutograd": reference_state_space, "CUDA": _on_cuda},
    fake=_fake,
    mutates=("conv_state", "state"),
)
