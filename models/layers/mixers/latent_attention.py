"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

Shapes: T tokens of a step, R of them in the result, D hidden size, H heads, d elements of a query
or key, v elements of a value.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.models.layers.norm_layers import RMSNorm
from ostinato.models.step_tensors import StepInputs
from ostinato.ops.attention import paged_attention
from ostinato.ops.rope import join_heads, rotate_heads

__all__ = ("LatentAttention",)


class LatentAttention(nn.Module):
    """Causal attention. A short vector of each token gives values and the unrotated part of keys.

    The rotated part of keys is computed from the hidden state. The cache holds the keys and values
    of every head, as for other models. A cache of the short vectors would be smaller, but each step
    would need two more matrix products.

    Args:
        config: the model's configuration.
        options: dtype, device, attention backend and shard.
        sliding_window: as `paged_attention` takes it.
        rope_kind: the rotary table, a key of `StepInputs.rope`.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: BuildOptions,
        *,
        sliding_window: int,
        rope_kind: str | None,
    ) -> None:
        super().__init__()
        spec = config.latent
        assert spec is not None, "the configuration must describe latent attention"
        assert rope_kind is not None, "latent attention must have rotary positions"
        heads = options.shard.span(config.num_heads, "num_attention_heads")
        self.num_heads = heads.size  # of this rank
        self.head_dim, self.value_dim = config.head_dim, config.value_dim
        self.plain_dim = config.head_dim - spec.rope_dim
        self.spec = spec
        self.rope_kind = rope_kind
        self.sliding_window = sliding_window
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.backend = options.attention_backend
        queries, values = heads.times(self.head_dim), heads.times(self.value_dim)
        # One product computes everything that depends on the hidden state directly: the queries (or
        # the vector from which they are computed), the rotated elements of the keys, and the vector
        # of keys and values.
        self.first_size = spec.query_rank or queries.size
        self.qkv_a_proj = MergedLinear(
            config.hidden_size,
            (spec.query_rank or queries, spec.rope_dim + spec.kv_rank),
            options,
        )
        self.q_a_norm = self.q_b_proj = None
        if spec.query_rank:
            self.q_a_norm = RMSNorm(spec.query_rank, spec.norm_eps, options)
            self.q_b_proj = Linear(spec.query_rank, queries, options)
        self.kv_a_norm = RMSNorm(spec.kv_rank, spec.norm_eps, options)
        self.kv_b_proj = MergedLinear(spec.kv_rank, (heads.times(self.plain_dim), values), options)
        self.o_proj = Linear(values, config.hidden_size, options)

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
        q, k, v = self._project(x, step)
        out = paged_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            step.attention(self.sliding_window),
            scale=self.scale,
            sliding_window=self.sliding_window,
            backend=self.backend,
        )
        out = out.reshape(-1, self.num_heads * self.value_dim)
        slots = step.tensors.adapter_slots
        if rows is not None:
            out = F.embedding(rows, out)
            residual = None if residual is None else F.embedding(rows, residual)
            slots = None if slots is None else F.embedding(rows, slots)
        return self.o_proj(out, residual, slots)

    def _project(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """[T, D] -> queries and keys [T, H, d], rotated elements first, and values [T, H, v]."""
        num_heads, rope_dim = self.num_heads, self.spec.rope_dim
        cos, sin = step.rope[self.rope_kind]
        slots = step.tensors.adapter_slots
        q, k_rotated, latent = self.qkv_a_proj(x, slots).split_with_sizes(
            (self.first_size, rope_dim, self.spec.kv_rank), 1
        )
        if self.q_a_norm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_norm(q), slots=slots)
        q = rotate_heads(q.view(-1, num_heads, self.head_dim), cos, sin, num_heads)
        k_rotated = rotate_heads(k_rotated.view(-1, 1, rope_dim), cos, sin, 0)
        k_plain, v = self.kv_b_proj(self.kv_a_norm(latent), slots).split_with_sizes(
            (num_heads * self.plain_dim, num_heads * self.value_dim), 1
        )
        k = join_heads(k_rotated, k_plain.view(-1, num_heads, self.plain_dim))
        return q, k, v.view(-1, num_heads, self.value_dim)

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return (
            "latent attention",
            self.num_heads,
            self.head_dim,
            self.value_dim,
            self.spec,
            self.rope_kind,
            self.sliding_window,
            self.scale,
            self.backend,
            self.qkv_a_proj.static_key,
            None if self.q_b_proj is None else self.q_b_proj.static_key,
            self.kv_b_proj.static_key,
            self.o_proj.static_key,
            self.kv_a_norm.static_key,
        )
