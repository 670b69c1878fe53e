"""The op `ostinato::rotary_attention`: paged attention from the result of the QKV projection.

In the backend `triton`, one kernel normalises and rotates the heads and writes keys and values into
the cache; then the backend attends. So rotated keys and split values are stored in the cache only.
`takes_projection` says which backends have this op. With other backends, models rotate the heads
themselves and call `paged_attention`.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from ostinato.ops.attention import AttentionBackend, AttentionMetadata, load_backend
from ostinato.ops.register import register_op

__all__ = ("ProjectedBackend", "rotary_attention", "takes_projection")

_PROJECTED = ("triton", "reference")


class ProjectedBackend(AttentionBackend, Protocol):
    """A backend that takes the result of the QKV projection."""

    def run_projected(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        num_heads: int,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int,
        soft_cap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Do what `rotary_attention` describes."""
        ...


def takes_projection(backend: str) -> bool:
    """Whether a backend (a name that `select_backend` returned) is a `ProjectedBackend`."""
    return backend in _PROJECTED


def rotary_attention(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    num_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str,
) -> Tensor:
    """Split, normalise and rotate the heads, write K and V, and attend.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D], heads of queries, keys, values; last dimension contiguous.
        rotary: cos and sin [T, R / 2] float32, contiguous; R <= D elements are rotated. None =
            nothing is rotated.
        norms: [D] each, the scales of an RMS norm of each query and key head, in qkv's dtype or
            float32; allowed only with `rotary`. None = no norm.
        eps: both norms add it to the mean square.
        num_heads: Hq.
        k_cache, v_cache, metadata, scale, sliding_window, soft_cap, alibi_slopes, sinks: as for
            `paged_attention`.
        backend: a name for which `takes_projection` is true.

    Returns:
        [T, Hq, D] in qkv's dtype, contiguous. Padding rows hold finite values of no meaning.
    """
    cos, sin = rotary or (None, None)
    q_weight, k_weight = norms or (None, None)
    return _op(
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        eps,
        num_heads,
        k_cache,
        v_cache,
        *metadata,
        scale,
        sliding_window,
        soft_cap,
        alibi_slopes,
        sinks,
        backend,
    )


def _kernel(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    plan: Tensor,
    visible_ends: Tensor | None,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    metadata = AttentionMetadata(
        query_start_loc, seq_lens, block_table, slot_mapping, plan, visible_ends
    )
    return cast(ProjectedBackend, load_backend(backend)).run_projected(
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        eps,
        num_heads,
        k_cache,
        v_cache,
        metadata,
        scale,
        sliding_window,
        soft_cap,
        alibi_slopes,
        sinks,
    )


def _fake(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    plan: Tensor,
    visible_ends: Tensor | None,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    head_dim = qkv.shape[1] // (num_heads + 2 * k_cache.shape[1])
    return qkv.new_empty((qkv.shape[0], num_heads, head_dim))


_op = register_op(
    "rotary_attention",
    {"CompositeExplicitAutograd": _kernel},
    fake=_fake,
    mutates=("k_cache", "v_cache"),
)
