"""A decoder block in few kernels, for small steps on a GPU.

The kernels in their order. An RMS norm is divided between the two kernels before and after it:

    1. norm: multiplication by its weight, sums of squares
    2. QKV projection; norm: division of the result by the root mean square
    3. norms and rotation of the heads, write of K and V
    4. attention
    5. output projection, residual; norm: multiplication by its weight, sums of squares
    6. gate and up projection; norm: division of the result by the root mean square; activation
    7. down projection, residual

With a mixture of experts, these replace the kernels 5 to 7:

    5. output projection, residual; norm, router, choice of experts
    6. gate and up of the chosen experts, activation
    7. down of the chosen experts, their weighted sum, residual

For more than 16 tokens, norm, router and choice of experts are a kernel of their own.

`FewRowsBlock` holds the modules of a `DecoderBlock` and calls the ops of ops/fused/. With plain
weights it is for steps of up to `most_rows` tokens (ops/fused/fused_linear.py). Larger steps spend
most of their time in matrix products, and cuBLAS is faster at these. Quantised weights have no
kernels of cuBLAS, so steps of up to `MOST_QUANTIZED_ROWS` tokens use the block. With experts, steps
of up to `MOST_EXPERT_ROWS` tokens use it; cuBLAS computes the two products before the experts if
there are more than `most_rows` tokens.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.base import FewRows
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.layers.mixers.attention_layer import Attention
from ostinato.models.layers.mlp import GatedMLP
from ostinato.models.layers.moe import Experts, MoE
from ostinato.models.layers.norm_layers import RMSNorm
from ostinato.models.step_tensors import StepInputs
from ostinato.models.weight_methods.grouped import QuantizedMatrix
from ostinato.models.weight_methods.plain import Plain
from ostinato.ops.activation import ACTIVATIONS
from ostinato.ops.fused.fused_experts import EXPERT_COUNTERS, MOST_EXPERTS, fused_experts
from ostinato.ops.fused.fused_linear import (
    FUSED_DTYPES,
    fused_linear,
    linear_and_scale,
    most_rows,
    norm_linear,
    scale_rows,
    scale_rows_and_clear,
)
from ostinato.ops.fused.fused_quantized import (
    COUNTERS_OF_PRODUCT,
    fused_quantized_linear,
    quantized_linear_and_scale,
)
from ostinato.ops.quantized_reference import QuantFormat

__all__ = ("MOST_EXPERT_ROWS", "MOST_QUANTIZED_ROWS", "FewRowsBlock")

MOST_EXPERT_ROWS = 256
"""The most tokens of a step for which layers with experts run the fused kernels.

Of more than `most_rows` tokens, cuBLAS multiplies the rows before the experts. The kernel that
routes tokens reads each row several times, so it is for few tokens.
"""

MOST_QUANTIZED_ROWS = 256
"""The most tokens of a step for which layers with quantised weights run the fused kernels.

The matrix kernels are the same in larger steps. There Inductor's kernels between them take less
than a tenth of the time.
"""

_PRODUCTS = 4  # QKV, output, gate and up, down


class FewRowsBlock(FewRows):
    """x + attention(norm(x)), then x + mlp(norm(x)), for the modules that `of` accepts."""

    def __init__(
        self, attention_norm: RMSNorm, self_attn: Attention, mlp_norm: RMSNorm, mlp: GatedMLP | MoE
    ) -> None:
        super().__init__()
        self.attention_norm, self.self_attn = attention_norm, self_attn
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.is_quantized = _is_quantized(self_attn.qkv_proj)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step that uses the block."""
        if isinstance(self.mlp, MoE):
            return MOST_EXPERT_ROWS
        dtype = self.self_attn.qkv_proj.spec.dtype
        return MOST_QUANTIZED_ROWS if self.is_quantized else most_rows(dtype)

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
        matrices = [self_attn.qkv_proj, self_attn.o_proj]
        if isinstance(mlp, GatedMLP):
            matrices += [mlp.gate_up_proj, mlp.down_proj]
        is_quantized = isinstance(mlp, GatedMLP) and all(map(_is_quantized, matrices))
        if (
            not (is_quantized or all(map(_is_plain, matrices)))
            or not self_attn.is_fused
            or self_attn.qkv_clip
            or self_attn.num_gates
            or not (_has_plain_experts(mlp) if isinstance(mlp, MoE) else _has_kernel(mlp))
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
        if self.is_quantized:
            return self._quantized(hidden, step, k_cache, v_cache, rows)
        if isinstance(self.mlp, MoE):
            return self._experts(self.mlp, hidden, step, k_cache, v_cache, rows)
        attention, norm, mlp = self.self_attn, self.mlp_norm, self.mlp
        scaled, squares = scale_rows(hidden, self.attention_norm.weight)
        qkv = _multiply(attention.qkv_proj, scaled, squares=squares, eps=self.attention_norm.eps)
        out = attention.attend(qkv, step, k_cache, v_cache)
        if rows is not None:
            out, hidden = F.embedding(rows, out), F.embedding(rows, hidden)
        output = attention.o_proj
        hidden, scaled, squares = linear_and_scale(
            out, output.weights["weight"], output.bias, hidden, norm.weight
        )
        inner = _multiply(
            mlp.gate_up_proj, scaled, squares=squares, eps=norm.eps, activation=mlp.activation
        )
        return _multiply(mlp.down_proj, inner, residual=hidden)

    def _experts(
        self,
        moe: MoE,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None,
    ) -> Tensor:
        """`forward` with experts; the first kernel clears the counters of later ones."""
        attention, norm, experts = self.self_attn, self.attention_norm, moe.experts
        assert isinstance(experts, Experts), "`of` accepts no others"
        qkv, counters = norm_linear(
            hidden,
            norm.weight,
            norm.eps,
            attention.qkv_proj.weights["weight"],
            attention.qkv_proj.bias,
            EXPERT_COUNTERS,
        )
        out = attention.attend(qkv, step, k_cache, v_cache)
        if rows is not None:
            out, hidden = F.embedding(rows, out), F.embedding(rows, hidden)
        return fused_experts(
            out,
            attention.o_proj.weights["weight"],
            attention.o_proj.bias,
            hidden,
            self.mlp_norm.weight,
            self.mlp_norm.eps,
            moe.gate.weights["weight"],
            moe.score_bias,
            experts.gate_up_proj.weights["weight"],
            experts.down_proj.weights["weight"],
            moe.spec.route,
            rounds_logits=not moe.spec.float32_router,
            activation=experts.activation,
            counters=counters,
        )

    def _quantized(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None,
    ) -> Tensor:
        """`forward` with quantised weights; the first kernel clears the counters of all others."""
        attention, norm, mlp = self.self_attn, self.mlp_norm, self.mlp
        assert isinstance(mlp, GatedMLP), "experts have no fused kernels for quantised weights"
        scaled, squares, counters = scale_rows_and_clear(
            hidden, self.attention_norm.weight, _PRODUCTS * COUNTERS_OF_PRODUCT
        )
        qkv = fused_quantized_linear(
            scaled,
            *_stored(attention.qkv_proj),
            counters,
            0,
            order=_order(attention.qkv_proj),
            squares=squares,
            eps=self.attention_norm.eps,
        )
        out = attention.attend(qkv, step, k_cache, v_cache)
        if rows is not None:
            out, hidden = F.embedding(rows, out), F.embedding(rows, hidden)
        output, gate_up, down = attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        hidden, scaled, squares = quantized_linear_and_scale(
            out, *_stored(output), counters, 1, hidden, norm.weight, order=_order(output)
        )
        inner = fused_quantized_linear(
            scaled,
            *_stored(gate_up, halves=2),
            counters,
            2,
            order=_order(gate_up),
            squares=squares,
            eps=norm.eps,
            activation=mlp.activation,
        )
        return fused_quantized_linear(
            inner, *_stored(down), counters, 3, residual=hidden, order=_order(down)
        )


def _is_plain(linear: LinearBase) -> bool:
    """Whether the fused kernels support a matrix.

    They need all of its columns on this rank, neither packed nor quantised, in `FUSED_DTYPES`.
    """
    is_stored_plain = isinstance(linear.method, Plain)
    return is_stored_plain and not linear.is_partial and linear.spec.dtype in FUSED_DTYPES


def _is_quantized(linear: LinearBase) -> bool:
    """Whether the fused kernels for quantised weights support a matrix."""
    is_stored_so = isinstance(linear.method, QuantizedMatrix)
    return is_stored_so and not linear.is_partial and linear.spec.dtype in FUSED_DTYPES


def _has_kernel(mlp: GatedMLP) -> bool:
    return mlp.activation in ACTIVATIONS


def _has_plain_experts(moe: MoE) -> bool:
    """Whether the fused kernels support the experts, and no other kernels were chosen for them.

    Supported experts have gates, no biases and no shared expert, and are all on this rank.
    """
    route, experts = moe.spec.route, moe.experts
    return isinstance(experts, Experts) and (
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


def _stored(linear: LinearBase, halves: int = 1) -> tuple[Tensor, Tensor | None, int, QuantFormat]:
    """The weight, the bias, the columns of the result, and the format, as the ops take them."""
    method = linear.method
    assert isinstance(method, QuantizedMatrix), f"{type(method).__name__} is not quantised"
    size = linear.out_features // halves
    return linear.weights["weight"], linear.bias, size, method.form(linear.spec)


def _order(linear: LinearBase) -> Tensor | None:
    return linear.weights.get("order")
