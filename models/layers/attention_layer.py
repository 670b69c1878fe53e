"""Attention over the paged KV cache, with its projections.

Like every layer, it depends only on its parameters, its inputs and its `static_key`. It has no
layer index and reads no global state. So layers with equal keys share one compiled program.

Shapes: T tokens of a step, D hidden size, Hq query heads, Hkv key and value heads, d head size.
The projection has (Hq + 2 Hkv) d values of a token; with gates of the result Hq d more before them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.block_spec import QKNorm
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.models.layers.norm_layers import RMSNorm, build_rms_norm, norm_all_heads
from ostinato.models.step_tensors import TEMPERATURE, StepInputs
from ostinato.ops.activation import sigmoid_gate
from ostinato.ops.attention import paged_attention
from ostinato.ops.fused.rotary_attention import rotary_attention, takes_projection
from ostinato.ops.rope import rotate_heads

__all__ = ("Attention",)


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
        temperature = config.query_temperature
        self.has_temperature = temperature is not None and (
            temperature.in_all_layers or rope_kind is None
        )
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
        # The gates are first, so that queries, keys and values are a slice of the result.
        gates = (queries,) if spec.has_output_gate else ()
        self.num_gates = queries.size if spec.has_output_gate else 0
        self.qkv_proj = MergedLinear(
            in_features or config.hidden_size,
            (*gates, queries, keys, keys),
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
        slots = step.tensors.adapter_slots
        out = self.attend_gated(self.qkv_proj(x, slots), step, k_cache, v_cache)
        if rows is not None:
            out = F.embedding(rows, out)
            residual = None if residual is None else F.embedding(rows, residual)
            slots = None if slots is None else F.embedding(rows, slots)
        return self.o_proj(out, residual, slots)

    def attend_gated(
        self, projected: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """`attend` with the queries, keys and values of a projection that may also have gates."""
        if not self.num_gates:
            return self.attend(projected, step, k_cache, v_cache)
        sizes = self.num_gates, self.qkv_proj.out_features - self.num_gates
        gates, qkv = projected.split_with_sizes(sizes, 1)
        return sigmoid_gate(self.attend(qkv, step, k_cache, v_cache), gates)

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
                step.attention(self.sliding_window),
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
            step.attention(self.sliding_window),
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
            self.num_gates,
            self.backend,
            self.qkv_proj.static_key,
            self.o_proj.static_key,
            self.qk_norm,
            None if self.q_norm is None else self.q_norm.static_key,
        )
