"""The parts that models are made of. Each depends on its parameters, its inputs and what it names
in `static_key`, on nothing else: no layer index, no context, no global.

Shapes: T tokens of a step, D hidden size, Hq query heads, Hkv key and value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.step_tensors import DEFAULT_ROPE, RopeRows, StepInputs
from ostinato.ops.activation import activate
from ostinato.ops.attention import paged_attention
from ostinato.ops.linear import empty_packed, gather_rows, linear, pack_linear_weight
from ostinato.ops.norm import layer_norm, rms_norm
from ostinato.ops.quantized import (
    empty_quantized,
    quantize_linear_weight,
    quantized_linear,
    quantized_rows,
)
from ostinato.ops.quantized_reference import QuantFormat
from ostinato.ops.rope import Rope, rope_tables, rotate_heads

__all__ = (
    "Attention",
    "BuildOptions",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "Matrix",
    "MergedLinear",
    "OutputHead",
    "RMSNorm",
    "RotaryEmbedding",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What a model is built for, besides its configuration."""

    dtype: torch.dtype  # of weights and activations
    device: torch.device  # "meta" gives shapes without memory
    attention_backend: str  # a name that ops.attention.select_backend returned
    max_model_len: int  # positions that it can be asked for


def _empty(options: BuildOptions, *shape: int) -> nn.Parameter:
    """Memory for a weight; nothing is written, so pages are not even mapped before loading."""
    return nn.Parameter(
        torch.empty(shape, dtype=options.dtype, device=options.device), requires_grad=False
    )


class Matrix(nn.Module):
    """A weight [out_features, in_features] in one of three forms: as it was loaded, packed for the
    CPU's kernels (ops/linear.py), or quantised (ops/quantized.py).
    """

    def __init__(self, in_features: int, out_features: int, options: BuildOptions) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = options.dtype  # of activations
        self.weight = _empty(options, out_features, in_features)
        self.packed = False
        self.quantized: QuantFormat | None = None

    @property
    def form(self) -> tuple[object, ...]:
        """What a traced program depends on besides tensors."""
        return (self.packed, self.quantized)

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        float32_output: bool = False,
    ) -> Tensor:
        """[T, in_features] -> [T, out_features], plus bias and residual if there are any."""
        if self.quantized is not None:
            return quantized_linear(
                x,
                self.weight,
                bias,
                self.out_features,
                self.quantized,
                residual=residual,
                float32_output=float32_output,
            )
        return linear(
            x,
            self.weight,
            bias,
            self.out_features,
            packed=self.packed,
            residual=residual,
            float32_output=float32_output,
        )

    def rows(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, in_features]."""
        size = (self.out_features, self.in_features)
        if self.quantized is not None:
            return quantized_rows(self.weight, ids, *size, self.quantized, dtype=self.dtype)
        return gather_rows(ids, self.weight, *size, packed=self.packed)

    def pack(self, *, fill: bool = True) -> None:
        """Replace the weight by its packed form; `packed` then says so to whoever compiles.

        Without `fill` only the form is there, for a model that is traced and never run.
        """
        weight = pack_linear_weight(self.weight) if fill else empty_packed(self.weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.packed = True

    def quantize(self, form: QuantFormat, *, fill: bool = True) -> None:
        """Replace the weight by its quantised form; `fill` as in `pack`."""
        weight = self.weight
        quantized = quantize_linear_weight(weight, form) if fill else empty_quantized(weight, form)
        self.weight = nn.Parameter(quantized, requires_grad=False)
        self.quantized = form

    def holds(self, weight: Tensor) -> bool:
        """Whether the weight was made of this one [out_features, in_features]; not if packed."""
        weight = weight.to(self.weight.device, self.dtype)
        if self.quantized is not None:
            weight = quantize_linear_weight(weight, self.quantized)
        return torch.equal(self.weight, weight)


class Linear(Matrix):
    """y = x W^T + b."""

    def __init__(
        self, in_features: int, out_features: int, options: BuildOptions, *, bias: bool = False
    ) -> None:
        super().__init__(in_features, out_features, options)
        self.bias = _empty(options, out_features) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in_features] -> [T, out_features], plus a residual of that shape if there is one."""
        return self.multiply(x, self.bias, residual)


class MergedLinear(Linear):
    """Several projections of one input as a single matrix; `sizes` are their output features."""

    def __init__(
        self, in_features: int, sizes: tuple[int, ...], options: BuildOptions, *, bias: bool = False
    ) -> None:
        super().__init__(in_features, sum(sizes), options, bias=bias)
        self.sizes = sizes


class OutputHead(Linear):
    """Hidden states to logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, D] -> [S, vocab_size] float32."""
        return self.multiply(hidden, self.bias, float32_output=True)


class Embedding(Matrix):
    """Rows of a table [num_rows, D]; with `is_head` the output head reads the same table."""

    def __init__(
        self, num_rows: int, hidden_size: int, options: BuildOptions, *, is_head: bool = False
    ) -> None:
        super().__init__(hidden_size, num_rows, options)
        self.is_head = is_head

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, D]."""
        return self.rows(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, D] -> [S, num_rows] float32."""
        return self.multiply(hidden, float32_output=True)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension."""

    def __init__(self, size: int, eps: float, options: BuildOptions) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _empty(options, size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Mean and variance normalisation of the last dimension."""

    def __init__(self, size: int, eps: float, options: BuildOptions) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _empty(options, size)
        self.bias = _empty(options, size)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class RotaryEmbedding(nn.Module):
    """The rows of the cosine and sine tables at a step's positions."""

    cos: Tensor  # [max_model_len, rotary_dim / 2] float32
    sin: Tensor

    def __init__(self, rope: Rope, options: BuildOptions) -> None:
        super().__init__()
        cos, sin = rope_tables(rope, options.max_model_len, options.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: Tensor) -> RopeRows:
        """[T] int64 -> cos, sin [T, rotary_dim / 2] float32."""
        return RopeRows(F.embedding(positions, self.cos), F.embedding(positions, self.sin))


class Attention(nn.Module):
    """Causal attention over the paged KV cache, with grouped query heads (arXiv:2305.13245)."""

    def __init__(
        self,
        config: ModelConfig,
        options: BuildOptions,
        *,
        sliding_window: int = 0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        rope_kind: str = DEFAULT_ROPE,
    ) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.rope_kind = None if config.rope is None else rope_kind
        if qk_norm and self.rope_kind is None:
            raise ValueError("normalised queries and keys are there with rotary positions only")
        self.sliding_window = sliding_window
        self.backend = options.attention_backend
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = MergedLinear(
            config.hidden_size, (query_size, kv_size, kv_size), options, bias=qkv_bias
        )
        self.o_proj = Linear(query_size, config.hidden_size, options, bias=out_bias)
        # Normalised per head: https://arxiv.org/abs/2010.04245, as in Qwen3.
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps, options) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps, options) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        residual: Tensor,
        rows: Tensor | None,
    ) -> Tensor:
        """[T, D] -> [T, D] (of `rows` only: [R, D]), added to the residual; writes K and V into the
        caches.
        """
        # Only views: a graph of ops and views needs no code of a compiler's (graphs/straight.py).
        num_rotated, num_kv = self.num_heads + self.num_kv_heads, self.num_kv_heads
        heads = self.qkv_proj(x).view(-1, num_rotated + num_kv, self.head_dim)
        queries_keys, v = heads.split_with_sizes((num_rotated, num_kv), 1)
        if self.rope_kind is not None:
            queries_keys = rotate_heads(
                queries_keys,
                *step.rope[self.rope_kind],
                self.num_heads,
                q_weight=None if self.q_norm is None else self.q_norm.weight,
                k_weight=None if self.k_norm is None else self.k_norm.weight,
                eps=0.0 if self.q_norm is None else self.q_norm.eps,
            )
        q, k = queries_keys.split_with_sizes((self.num_heads, num_kv), 1)
        out = paged_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            step.attention,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            backend=self.backend,
        )
        out = out.reshape(-1, self.num_heads * self.head_dim)
        if rows is not None:
            out, residual = F.embedding(rows, out), F.embedding(rows, residual)
        return self.o_proj(out, residual)

    def static_key(self) -> tuple[object, ...]:
        """What the traced program depends on besides tensors."""
        return (
            "attention",
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rope_kind,
            self.sliding_window,
            self.backend,
            self.qkv_proj.bias is not None,
            self.o_proj.bias is not None,
            self.qkv_proj.form,
            self.o_proj.form,
            None if self.q_norm is None else self.q_norm.eps,
        )


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)): the gated linear unit of arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.gate_up_proj = MergedLinear(
            hidden_size, (intermediate_size, intermediate_size), options, bias=config.mlp_bias
        )
        self.down_proj = Linear(intermediate_size, hidden_size, options, bias=config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, D] -> [T, D], added to the residual."""
        return self.down_proj(activate(self.gate_up_proj(x), self.activation, gated=True), residual)

    def static_key(self) -> tuple[object, ...]:
        """What the traced program depends on besides tensors."""
        return (
            "gated mlp",
            self.activation,
            self.down_proj.bias is not None,
            self.gate_up_proj.form,
            self.down_proj.form,
        )
