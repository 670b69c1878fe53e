"""The op `ostinato::gated_delta_rule`: the mixer of a gated delta net, without its projections.

It convolves queries, keys and values, applies the gated delta rule (arXiv:2412.06464), and scales
the normalised result by a gate.

Shapes: T tokens of a step, S sequences, Hk heads of queries and keys, Hv heads of values (a
multiple of Hk), K and V their sizes, C = 2 Hk K + Hv V channels, W the width of the convolution.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.recurrent.states import convolve, silu, state_rows
from ostinato.ops.register import register_op

__all__ = ("gated_delta_rule", "reference_gated_delta_rule")

_UNIT_EPS = 1e-6  # of the norms of queries and keys


def gated_delta_rule(
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
    """Advance the states of the step's sequences by their tokens.

    For each token and value head, with unit queries and keys q / sqrt(K), k:

        S = exp(g) S;  d = sigmoid(b) (v - k S);  S = S + k^T d;  o = q S
        g = -exp(A) softplus(a + dt_bias);  result = norm(o) * norm_weight * silu(z)

    All of it is computed in float32 and rounded once.

    Args:
        qkvz: [T, C + Hv V]: queries, keys, values and gates z of a token. A value head h uses the
            query and key head h * Hk // Hv.
        gates: [T, 2 Hv]: b and a of the value heads.
        conv_weight: [C, W]; see `convolve`. SiLU follows.
        a_log: [Hv] float32: A.
        dt_bias: [Hv] float32.
        norm_weight: [V], of the RMS norm of each value head.
        conv_state: [slots, W - 1, C] in the dtype of qkvz, changed.
        state: [slots, Hv, K, V] float32, changed.
        query_start_loc: [S + 1] int32, the first row of each sequence, then the total.
        state_slots: [S, 4] int32; see the columns in `ops.recurrent.states`.
        num_k_heads: Hk.
        norm_eps: added to the mean square.

    Returns:
        [T, Hv V] contiguous, in the dtype of qkvz. Rows of padding are zero.

    Raises:
        ValueError: the CPU kernel refused a shape, a dtype or a slot; or a CUDA kernel refused
            strides.
    """
    return _op(
        qkvz,
        gates,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        query_start_loc,
        state_slots,
        num_k_heads,
        norm_eps,
    )


def reference_gated_delta_rule(
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
    """`gated_delta_rule` in torch operations."""
    _, num_heads, k_dim, v_dim = state.shape
    channels, heads = conv_weight.shape[0], num_heads // num_k_heads
    out = qkvz.new_zeros(len(qkvz), num_heads * v_dim)
    b, a = gates.float().split(num_heads, 1)
    beta = torch.sigmoid(b)
    kept = torch.exp(-torch.exp(a_log) * F.softplus(a + dt_bias))
    for sequence in state_rows(query_start_loc, state_slots):
        earlier, current = conv_state[sequence.read].float(), state[sequence.read].clone()
        if not sequence.read:
            earlier, current = torch.zeros_like(earlier), torch.zeros_like(current)
        for begin, end, slot in sequence.parts():
            x = qkvz[begin:end, :channels].float()
            mixed, earlier = convolve(x, conv_weight, None, earlier)
            sizes = (num_k_heads * k_dim, num_k_heads * k_dim, num_heads * v_dim)
            q, k, v = silu(mixed).split(sizes, 1)
            q, k = (_units(one.view(-1, num_k_heads, k_dim), heads) for one in (q, k))
            q, v = q * k_dim**-0.5, v.view(-1, num_heads, v_dim)
            z = qkvz[begin:end, channels:].view(-1, num_heads, v_dim)
            for row in range(end - begin):
                current = current * kept[begin + row, :, None, None]
                read = torch.einsum("hk,hkv->hv", k[row], current)
                delta = beta[begin + row, :, None] * (v[row] - read)
                current = current + k[row].unsqueeze(2) * delta.unsqueeze(1)
                o = torch.einsum("hk,hkv->hv", q[row], current)
                o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm_eps)
                out[begin + row] = (o * norm_weight.float() * silu(z[row])).view(-1).to(out.dtype)
            conv_state[slot], state[slot] = earlier.to(conv_state.dtype), current
    return out


def _units(x: Tensor, heads: int) -> Tensor:
    """[N, Hk, K] -> [N, Hv, K] of length 1."""
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)
    return x.repeat_interleave(heads, 1)


def _on_cuda(*arguments: Any) -> Tensor:
    kernels = import_module("ostinato.ops.recurrent.triton_delta_rule")  # needs Triton
    return kernels.delta_rule_on_cuda(*arguments)


def _fake(
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
    return qkvz.new_empty(qkvz.shape[0], state.shape[1] * state.shape[3])


_op = register_op(
    "gated_delta_rule",
    {"CompositeExplicitAutograd": reference_gated_delta_rule, "CUDA": _on_cuda},
    fake=_fake,
    mutates=("conv_state", "state"),
)
