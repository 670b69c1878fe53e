"""A decoder block in few kernels, for steps of few tokens on a GPU.

The kernels in their order. An RMS norm is divided between the two kernels before and after it:

    1. norm: multiplication by its weight, sums of squares
    2. QKV projection; norm: division of the result by the root mean square
    3. norms and rotation of the heads, write of K and V
    4. attention
    5. output projection, residual; norm: multiplication by its weight, sums of squares
    6. gate and up projection; norm: division of the result by the root mean square; activation
    7. down projection, residual

With a mixture of experts, these replace the kernels 5 to 7:

    5. output projection, residual
    6. norm, router, choice of experts
    7. gate and up of the chosen experts, activation
    8. down of the chosen experts, their weighted sum, residual

`FewRowsBlock` holds the modules of a `DecoderBlock` and calls the ops of ops/fused/. Steps of more
than `most_rows` tokens (ops/fused/fused_linear.py) spend most of their time in matrix products, and
cuBLAS is faster at these.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.layers.attention_layer import Attention
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.layers.mlp import GatedMLP
from ostinato.models.layers.moe import MoE
from ostinato.models.layers.norm_layers import RMSNorm
from ostinato.models.step_tensors import StepInputs
from ostinato.models.weight_methods.plain import Plain
from ostinato.ops.activation import ACTIVATIONS
from ostinato.ops.fused.fused_experts import MOST_EXPERTS, fused_experts
from ostinato.ops.fused.fused_linear import (
    FUSED_DTYPES,
    fused_linear,
    linear_and_scale,
    scale_rows,
)

__all__ = ("FewRowsBlock",)


class FewRowsBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), for the modules that `of` accepts."""

    def __init__(
        self, attention_norm: RMSNorm, self_attn: Attention, mlp_norm: RMSNorm, mlp: GatedMLP | MoE
    ) -> None:
        super().__init__()
        self.attention_norm, self.self_attn = attention_norm, self_attn
        self.mlp_norm, self.mlp = mlp_norm, mlp

    @classmethod
    def of(
        cls, attention_norm: nn.Module, self_attn: nn.Module, mlp_norm: nn.Module, mlp: nn.Module
    ) -> FewRowsBlock | None:
        """The block of these modules, or None if the fused ops cannot compute one of them."""
        if not (
            isinstance(attention_norm, RMSNorm)
            and isinstance(self_attn, Attention)
            and isinstance(mlp_norm, RMSNorm)
            and isinstance(mlp, GatedMLP | MoE)
        ):
            return None
        matrices = (self_attn.qkv_proj, self_attn.o_proj)
        if (
            not all(map(_is_plain, matrices))
            or not self_attn.is_fused
            or self_attn.qkv_clip
            or not (_has_plain_experts(mlp) if isinstance(mlp, MoE) else _is_plain_mlp(mlp))
        ):
            return None
        return cls(attention_norm, self_attn, mlp_norm, mlp)

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `DecoderLayer.forward`."""
        attention, mlp = self.self_attn, self.mlp
        scaled, squares = scale_rows(hidden, self.attention_norm.weight)
        qkv = _multiply(attention.qkv_proj, scaled, squares=squares, eps=self.attention_norm.eps)
        out = attention.attend(qkv, step, k_cache, v_cache)
        if rows is not None:
            out, hidden = F.embedding(rows, out), F.embedding(rows, hidden)
        output, norm = attention.o_proj, self.mlp_norm
        if isinstance(mlp, MoE):
            return _experts(output, norm, mlp, out, hidden)
        hidden, scaled, squares = linear_and_scale(
            out, output.weights["weight"], output.bias, hidden, norm.weight
        )
        inner = _multiply(
            mlp.gate_up_proj, scaled, squares=squares, eps=norm.eps, activation=mlp.activation
        )
        return _multiply(mlp.down_proj, inner, residual=hidden)


def _is_plain(linear: LinearBase) -> bool:
    """Whether the fused kernels support a matrix.

    They need all of its columns on this rank, neither packed nor quantised, in `FUSED_DTYPES`.
    """
    is_stored_plain = isinstance(linear.method, Plain)
    return is_stored_plain and not linear.is_partial and linear.spec.dtype in FUSED_DTYPES


def _is_plain_mlp(mlp: GatedMLP) -> bool:
    return mlp.activation in ACTIVATIONS and all(map(_is_plain, (mlp.gate_up_proj, mlp.down_proj)))


def _has_plain_experts(moe: MoE) -> bool:
    """Whether the fused kernels support the experts, and no other kernels were chosen for them.

    Supported experts have no biases and no shared expert, and are all on this rank.
    """
    route, experts = moe.spec.route, moe.experts
    return (
        all(map(_is_plain, (moe.gate, experts.gate_up_proj, experts.down_proj)))
        and experts.activation in ACTIVATIONS
        and not experts.by_flashinfer
        and experts.down_proj.experts.size == route.num_experts <= MOST_EXPERTS
        and route.num_groups == 1
        and moe.shared_expert is None
        and moe.gated_expert is None
        and not moe.spec.has_bias
        and not moe.spec.scales_input
    )


def _experts(o_proj: LinearBase, norm: RMSNorm, moe: MoE, x: Tensor, residual: Tensor) -> Tensor:
    """The output projection of the attention, and the experts after it."""
    return fused_experts(
        x,
        o_proj.weights["weight"],
        o_proj.bias,
        residual,
        norm.weight,
        norm.eps,
        moe.gate.weights["weight"],
        moe.score_bias,
        moe.experts.gate_up_proj.weights["weight"],
        moe.experts.down_proj.weights["weight"],
        moe.spec.route,
        rounds_logits=not moe.spec.float32_router,
        activation=moe.experts.activation,
    )


def _multiply(
    linear: LinearBase,
    x: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    return fused_linear(
        x,
        linear.weights["weight"],
        linear.bias,
        squares=squares,
        eps=eps,
        activation=activation,
        residual=residual,
    )
