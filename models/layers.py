"""The layers that models are made of: attention, MLPs, norms, rotary embeddings.

A layer depends only on its parameters, its inputs and its `static_key`. It has no layer index and
reads no global state. So layers with equal keys share one compiled program.

Shapes: T tokens of a step, D hidden size, Hq query heads, Hkv key and value heads, d head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.block_spec import NormKind, QKNorm
from ostinato.models.config.model_config import ModelConfig, QueryTemperature
from ostinato.models.head_norms import norm_all_heads
from ostinato.models.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.models.sharding import Span
from ostinato.models.step_tensors import TEMPERATURE, RopeRows, StepInputs, TableRows
from ostinato.ops.activation import activate
from ostinato.ops.attention import paged_attention
from ostinato.ops.fused.rotary_attention import rotary_attention, takes_projection
from ostinato.ops.norm import layer_norm, rms_norm
from ostinato.ops.rope import Rope, rope_tables, rotate_heads

__all__ = (
    "Attention",
    "GatedMLP",
    "LayerNorm",
    "PlainMLP",
    "RMSNorm",
    "RotaryEmbedding",
    "TemperatureTable",
    "build_mlp",
    "build_norm",
    "build_rms_norm",
)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension.

    Args:
        size: elements of the last dimension; a span if this rank holds a part of them.
        eps: added to the mean square.
        options: dtype and device.
        plus_one: checkpoints store the weight minus 1. The weight is kept in float32, because
            bfloat16 would lose bits of it.
        has_weight: False = the weight is a buffer of ones.

    Attributes:
        stored_offset: the number that loading adds to the stored weight.
        held: the elements of the weight that this rank holds.
    """

    weight: Tensor

    def __init__(
        self,
        size: int | Span,
        eps: float,
        options: BuildOptions,
        *,
        plus_one: bool = False,
        has_weight: bool = True,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.stored_offset = 1.0 if plus_one else 0.0
        self.held = {"weight": (span := Span.of(size))}
        if has_weight:
            wide = replace(options, dtype=torch.float32)
            self.weight = (wide if plus_one else options).empty(span.size)
        else:
            ones = torch.ones(span.size, dtype=options.dtype, device=options.device)
            self.register_buffer("weight", ones, persistent=False)

    @property
    def static_key(self) -> tuple[object, ...]:
        """What a traced program depends on besides tensors."""
        return ("rms norm", self.eps, self.weight.dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, D] -> [T, D], added to the residual if there is one."""
        return rms_norm(x, self.weight, self.eps, residual)


class LayerNorm(nn.Module):
    """Mean and variance normalisation of the last dimension.

    Without `has_bias` the bias is a buffer of zeros.
    """

    bias: Tensor

    def __init__(
        self, size: int, eps: float, options: BuildOptions, *, has_bias: bool = True
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = options.empty(size)
        if has_bias:
            self.bias = options.empty(size)
        else:
            zeros = torch.zeros(size, dtype=options.dtype, device=options.device)
            self.register_buffer("bias", zeros, persistent=False)

    @property
    def static_key(self) -> tuple[object, ...]:
        """What a traced program depends on besides tensors."""
        return ("layer norm", self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def build_norm(config: ModelConfig, options: BuildOptions) -> RMSNorm | LayerNorm:
    """The norm of hidden states that the model uses."""
    kind = config.block.norm
    if kind in (NormKind.rms, NormKind.rms_plus_one):
        return build_rms_norm(config, options, config.hidden_size)
    has_bias = kind is NormKind.layer
    return LayerNorm(config.hidden_size, config.norm_eps, options, has_bias=has_bias)


def build_rms_norm(config: ModelConfig, options: BuildOptions, size: int | Span) -> RMSNorm:
    """An RMS norm of `size` elements, its weight stored as in the model's other norms."""
    plus_one = config.block.norm is NormKind.rms_plus_one
    return RMSNorm(size, config.norm_eps, options, plus_one=plus_one)


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


class TemperatureTable(nn.Module):
    """The factors of queries at a step's positions (`QueryTemperature`)."""

    factors: Tensor  # [max_model_len, 1] float32

    def __init__(self, temperature: QueryTemperature, options: BuildOptions) -> None:
        super().__init__()
        shape = (options.max_model_len, 1)
        if options.device.type == "meta":
            factors = torch.empty(shape, dtype=torch.float32, device=options.device)
        else:
            positions = torch.arange(shape[0], dtype=torch.float32, device=options.device)
            steps = torch.floor((positions + 1.0) / temperature.floor)
            factors = (torch.log1p(steps) * temperature.scale + 1.0).view(shape)
        self.register_buffer("factors", factors, persistent=False)

    def forward(self, positions: Tensor) -> TableRows:
        """[T] int64 -> [T, 1] float32."""
        return TableRows(F.embedding(positions, self.factors))


class Attention(nn.Module):
    """Causal attention over the paged KV cache, with grouped query heads (arXiv:2305.13245).

    Args:
        config: the model's configuration.
        options: dtype, device, attention backend and shard.
        sliding_window: as `paged_attention` takes it.
        rope_kind: the rotary table, a key of `StepInputs.rope`; None = nothing is rotated.
        in_features: size of a token's input to the QKV projection; None = D.

    Attributes:
        held: for each parameter that is divided among ranks, the elements that this rank holds.
        cache_scales: [2] float32, the divisors of keys and of values when they are stored; None =
            no division.

    Raises:
        ValueError: the heads cannot be divided among the ranks, or a layer without rotary positions
            has a norm of each head.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: BuildOptions,
        *,
        sliding_window: int,
        rope_kind: str | None,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        spec = config.block
        heads = options.shard.span(config.num_heads, "num_attention_heads")
        kv_heads = options.shard.kv_heads(config.num_kv_heads)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size  # heads of this rank
        self.head_dim = config.head_dim
        self.rope_kind = rope_kind
        self.qk_norm = spec.qk_norm
        if spec.qk_norm is QKNorm.unit and rope_kind is None:
            self.qk_norm = QKNorm.none
        self.has_temperature = config.query_temperature is not None and rope_kind is None
        if spec.qk_norm is QKNorm.head and rope_kind is None:
            raise ValueError(
                "a norm of each head (QKNorm.head) needs a layer with rotary positions"
            )
        self.sliding_window = sliding_window
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.soft_cap = config.attention_soft_cap
        self.qkv_clip = config.qkv_clip
        self.backend = options.attention_backend
        # `rotary_attention` takes the result of the projection. It supports no norm over all heads
        # of a token, no norm without weights, and no factors of queries, keys or values.
        self.is_fused = (
            spec.qk_norm in (QKNorm.none, QKNorm.head)
            and config.query_temperature is None
            and not options.has_cache_scales
            and takes_projection(self.backend)
        )
        queries, keys = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        self.qkv_proj = MergedLinear(
            in_features or config.hidden_size,
            (queries, keys, keys),
            options,
            bias=spec.qkv_bias,
        )
        self.o_proj = Linear(queries, config.hidden_size, options, bias=spec.out_bias)
        self.q_norm = self.k_norm = None
        if self.qk_norm is QKNorm.unit:
            self.q_norm = self.k_norm = RMSNorm(
                config.head_dim, config.norm_eps, options, has_weight=False
            )
        elif self.qk_norm is not QKNorm.none:
            sizes = (queries, keys) if self.qk_norm is QKNorm.full else (config.head_dim,) * 2
            self.q_norm, self.k_norm = (build_rms_norm(config, options, size) for size in sizes)
        slopes = None
        if config.alibi_slopes:
            held = config.alibi_slopes[heads.start : heads.start + heads.size]
            slopes = torch.tensor(held, dtype=torch.float32, device=options.device)
        self.alibi_slopes: Tensor | None
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        single = replace(options, dtype=torch.float32)
        self.sinks = single.empty(heads.size) if spec.has_sinks else None
        self.held = {"sinks": heads}
        scales = None
        if options.has_cache_scales:
            scales = torch.ones(2, dtype=torch.float32, device=options.device)
        self.cache_scales: Tensor | None
        self.register_buffer("cache_scales", scales, persistent=False)

    def forward(
        self,
        x: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        residual: Tensor | None,
        rows: Tensor | None,
    ) -> Tensor:
        """[T, D] -> [T, D], plus the residual if there is one; with `rows` only these rows, [R, D].

        Writes K and V into the caches.
        """
        # A layer with only views, row selections and ops of this package runs without Inductor
        # (graphs/compiler/fx_program.py).
        out = self.attend(self.qkv_proj(x), step, k_cache, v_cache)
        if rows is not None:
            out = F.embedding(rows, out)
            residual = None if residual is None else F.embedding(rows, residual)
        return self.o_proj(out, residual)

    def attend(self, qkv: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """The QKV projection [T, (Hq + 2 Hkv) d] -> [T, Hq d]; writes K and V into the caches."""
        if self.qkv_clip:
            qkv = qkv.clamp(-self.qkv_clip, self.qkv_clip)
        if self.is_fused:
            rotary, norms = None, None
            if self.rope_kind is not None:
                cos, sin = step.rope[self.rope_kind]
                rotary = cos, sin
            if self.q_norm is not None and self.k_norm is not None:
                norms = self.q_norm.weight, self.k_norm.weight
            out = rotary_attention(
                qkv,
                rotary,
                norms,
                0.0 if self.q_norm is None else self.q_norm.eps,
                self.num_heads,
                k_cache,
                v_cache,
                step.attention,
                scale=self.scale,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                alibi_slopes=self.alibi_slopes,
                sinks=self.sinks,
                backend=self.backend,
            )
            return out.reshape(-1, self.num_heads * self.head_dim)
        q, k, v = self._split(qkv, step)
        if self.cache_scales is not None:
            # (q * s) . (k / s) = q . k, so no backend needs the scales.
            k_scale, v_scale = self.cache_scales.unbind()
            q, k, v = q * k_scale, k / k_scale, v / v_scale
        out = paged_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            step.attention,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            backend=self.backend,
        )
        if self.cache_scales is not None:
            out = out * self.cache_scales[1]
        return out.reshape(-1, self.num_heads * self.head_dim)

    def _split(self, qkv: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, Hq, d], rotated keys [T, Hkv, d], and values [T, Hkv, d]."""
        num_heads, num_kv, size = self.num_heads, self.num_kv_heads, self.head_dim
        if self.qk_norm is QKNorm.full:
            assert self.q_norm is not None, "the norms are built with the spec"
            assert self.k_norm is not None, "the norms are built with the spec"
            q, k, v = qkv.split_with_sizes((num_heads * size, num_kv * size, num_kv * size), 1)
            weights = self.q_norm.weight, self.k_norm.weight
            q, k = norm_all_heads(q, k, weights, self.q_norm.eps, self.o_proj)
            q, k = q.view(-1, num_heads, size), k.view(-1, num_kv, size)
            if self.rope_kind is not None:
                cos, sin = step.rope[self.rope_kind]
                q = rotate_heads(q, cos, sin, num_heads)
                k = rotate_heads(k, cos, sin, 0)
            return q, k, v.view(-1, num_kv, size)
        num_rotated = num_heads + num_kv
        heads = qkv.view(-1, num_rotated + num_kv, size)
        queries_keys, v = heads.split_with_sizes((num_rotated, num_kv), 1)
        if self.rope_kind is not None:
            cos, sin = step.rope[self.rope_kind]
            queries_keys = rotate_heads(
                queries_keys,
                cos,
                sin,
                num_heads,
                q_weight=None if self.q_norm is None else self.q_norm.weight,
                k_weight=None if self.k_norm is None else self.k_norm.weight,
                eps=0.0 if self.q_norm is None else self.q_norm.eps,
            )
        q, k = queries_keys.split_with_sizes((num_heads, num_kv), 1)
        if self.has_temperature:
            (factors,) = step.rope[TEMPERATURE]
            q = (q * factors.unsqueeze(2)).to(q.dtype)
        return q, k, v

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return (
            "attention",
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rope_kind,
            self.sliding_window,
            self.scale,
            self.soft_cap,
            self.qkv_clip,
            self.alibi_slopes is not None,
            self.sinks is not None,
            self.cache_scales is not None,
            self.has_temperature,
            self.backend,
            self.qkv_proj.static_key,
            self.o_proj.static_key,
            self.qk_norm,
            None if self.q_norm is None else self.q_norm.static_key,
        )


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)): the gated linear unit of arXiv:2002.05202.

    Args:
        config: the model's configuration.
        options: dtype, device and shard.
        intermediate_size: features between the matrices; None = that of the model's MLPs.
    """

    def __init__(
        self, config: ModelConfig, options: BuildOptions, intermediate_size: int | None = None
    ) -> None:
        super().__init__()
        hidden_size, bias = config.hidden_size, config.block.mlp_bias
        size = intermediate_size or config.intermediate_size
        inner = options.shard.span(size, "intermediate_size")
        self.activation = config.activation
        self.gate_up_proj = MergedLinear(hidden_size, (inner, inner), options, bias=bias)
        self.down_proj = Linear(inner, hidden_size, options, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """[T, D] -> [T, D], added to the residual if there is one."""
        return self.down_proj(activate(self.gate_up_proj(x), self.activation, gated=True), residual)

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return (
            "gated mlp",
            self.activation,
            self.gate_up_proj.static_key,
            self.down_proj.static_key,
        )


class PlainMLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        hidden_size, bias = config.hidden_size, config.block.mlp_bias
        inner = options.shard.span(config.intermediate_size, "intermediate_size")
        self.activation = config.activation
        self.up_proj = Linear(hidden_size, inner, options, bias=bias)
        self.down_proj = Linear(inner, hidden_size, options, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """[T, D] -> [T, D], added to the residual if there is one."""
        return self.down_proj(activate(self.up_proj(x), self.activation), residual)

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return ("mlp", self.activation, self.up_proj.static_key, self.down_proj.static_key)


def build_mlp(config: ModelConfig, options: BuildOptions) -> GatedMLP | PlainMLP:
    """The MLP that the model's blocks use."""
    return (GatedMLP if config.block.is_gated else PlainMLP)(config, options)
