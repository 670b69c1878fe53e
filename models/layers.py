"""The layers that models are made of: attention, the gated MLP, norms, rotary embeddings.

A layer depends on its parameters, its inputs and its `static_key`, and on nothing else: it has no
layer index and reads no context. So layers with equal keys share one compiled program.

Shapes: T tokens of a step, D hidden size, Hq query heads, Hkv key and value heads, d head size.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.block_spec import NormKind
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.models.step_tensors import DEFAULT_ROPE, RopeRows, StepInputs
from ostinato.ops.activation import activate
from ostinato.ops.attention import paged_attention
from ostinato.ops.norm import layer_norm, rms_norm
from ostinato.ops.rope import Rope, rope_tables, rotate_heads

__all__ = (
    "Attention",
    "GatedMLP",
    "LayerNorm",
    "PlainMLP",
    "RMSNorm",
    "RotaryEmbedding",
    "build_mlp",
    "build_norm",
)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension."""

    def __init__(self, size: int, eps: float, options: BuildOptions) -> None:
        super().__init__()
        self.eps = eps
        self.weight = options.empty(size)

    @property
    def static_key(self) -> tuple[object, ...]:
        """What a traced program depends on besides tensors."""
        return ("rms norm", self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Mean and variance normalisation of the last dimension."""

    def __init__(self, size: int, eps: float, options: BuildOptions) -> None:
        super().__init__()
        self.eps = eps
        self.weight = options.empty(size)
        self.bias = options.empty(size)

    @property
    def static_key(self) -> tuple[object, ...]:
        """What a traced program depends on besides tensors."""
        return ("layer norm", self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def build_norm(config: ModelConfig, options: BuildOptions) -> RMSNorm | LayerNorm:
    """The norm of hidden states that the model uses."""
    build = {NormKind.rms: RMSNorm, NormKind.layer: LayerNorm}[config.block.norm]
    return build(config.hidden_size, config.norm_eps, options)


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
        rope_kind: str = DEFAULT_ROPE,
    ) -> None:
        super().__init__()
        spec = config.block
        heads = options.shard.span(config.num_heads, "num_attention_heads")
        kv_heads = options.shard.kv_heads(config.num_kv_heads)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size  # of this rank
        self.head_dim = config.head_dim
        self.rope_kind = None if config.rope is None else rope_kind
        if spec.qk_norm and self.rope_kind is None:
            raise ValueError("normalised queries and keys are there with rotary positions only")
        self.sliding_window = sliding_window
        self.backend = options.attention_backend
        queries, keys = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        self.qkv_proj = MergedLinear(
            config.hidden_size, (queries, keys, keys), options, bias=spec.qkv_bias
        )
        self.o_proj = Linear(queries, config.hidden_size, options, bias=spec.out_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps, options) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps, options) if spec.qk_norm else None

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
        # Ops and views alone are lowered without a compiler (graphs/compiler/fx_program.py).
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
            self.qkv_proj.static_key,
            self.o_proj.static_key,
            None if self.q_norm is None else self.q_norm.eps,
        )


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)): the gated linear unit of arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        hidden_size, bias = config.hidden_size, config.block.mlp_bias
        inner = options.shard.span(config.intermediate_size, "intermediate_size")
        self.activation = config.activation
        self.gate_up_proj = MergedLinear(hidden_size, (inner, inner), options, bias=bias)
        self.down_proj = Linear(inner, hidden_size, options, bias=bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, D] -> [T, D], added to the residual."""
        return self.down_proj(activate(self.gate_up_proj(x), self.activation, gated=True), residual)

    def static_key(self) -> tuple[object, ...]:
        """What the traced program depends on besides tensors."""
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

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, D] -> [T, D], added to the residual."""
        return self.down_proj(activate(self.up_proj(x), self.activation), residual)

    def static_key(self) -> tuple[object, ...]:
        """What the traced program depends on besides tensors."""
        return ("mlp", self.activation, self.up_proj.static_key, self.down_proj.static_key)


def build_mlp(config: ModelConfig, options: BuildOptions) -> GatedMLP | PlainMLP:
    """The MLP that the model's blocks use."""
    return (GatedMLP if config.block.is_gated else PlainMLP)(config, options)
