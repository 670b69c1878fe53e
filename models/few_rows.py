"""A decoder block in seven kernels, for steps of few tokens on a GPU.

    1. norm, QKV projection
    2. norms and rotation of the heads, write of K and V
    3. attention over parts of the context
    4. combination of the parts
    5. output projection, residual
    6. norm, gate and up projection, activation
    7. down projection, residual

`FewRowsBlock` holds the modules of a `DecoderBlock` and calls the ops of ops/fused/. Steps
of more tokens than `most_rows` spend most of their time in matrix products. cuBLAS is faster at
them.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.layers import Attention, GatedMLP, RMSNorm
from ostinato.models.linear_layers import LinearBase
from ostinato.models.step_tensors import StepInputs
from ostinato.models.weight_methods.plain import Plain
from ostinato.ops.activation import ACTIVATIONS
from ostinato.ops.fused.fused_linear import FUSED_DTYPES, fused_linear

__all__ = ("FewRowsBlock",)


class FewRowsBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `of` says for which modules."""

    def __init__(
        self, attention_norm: RMSNorm, self_attn: Attention, mlp_norm: RMSNorm, mlp: GatedMLP
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
            and isinstance(mlp, GatedMLP)
        ):
            return None
        matrices = (self_attn.qkv_proj, self_attn.o_proj, mlp.gate_up_proj, mlp.down_proj)
        if (
            not all(map(_is_plain, matrices))
            or not self_attn.is_fused
            or self_attn.qkv_clip
            or mlp.activation not in ACTIVATIONS
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
        """As `DecoderLayer.forward`."""
        attention, mlp = self.self_attn, self.mlp
        qkv = _multiply(attention.qkv_proj, hidden, norm=self.attention_norm)
        out = attention.attend(qkv, step, k_cache, v_cache)
        if rows is not None:
            out, hidden = F.embedding(rows, out), F.embedding(rows, hidden)
        hidden = _multiply(attention.o_proj, out, residual=hidden)
        inner = _multiply(mlp.gate_up_proj, hidden, norm=self.mlp_norm, activation=mlp.activation)
        return _multiply(mlp.down_proj, inner, residual=hidden)


def _is_plain(linear: LinearBase) -> bool:
    """Whether the matrix is whole, is stored as such, and has a dtype of the kernel."""
    is_stored_plain = isinstance(linear.method, Plain)
    return is_stored_plain and not linear.is_partial and linear.spec.dtype in FUSED_DTYPES


def _multiply(
    linear: LinearBase,
    x: Tensor,
    *,
    norm: RMSNorm | None = None,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    return fused_linear(
        x,
        linear.weights["weight"],
        linear.bias,
        norm_weight=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        activation=activation,
        residual=residual,
    )
