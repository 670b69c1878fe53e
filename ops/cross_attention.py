"""The op `ostinato::cross_attention`: every row attends to keys and values that a cache holds.

The caches have the layout of the KV cache, in blocks. They are written by `paged_attention` (see
`write_cross_cache`), so a cache belongs to one backend. Each row has its own block table. So the
rows of one step can belong to any sequences, and no row depends on another.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ostinato.ops.attention import AttentionMetadata, load_backend, paged_attention
from ostinato.ops.register import register_op

__all__ = ("CrossBackend", "cross_attention", "write_cross_cache")


@runtime_checkable
class CrossBackend(Protocol):
    """An attention backend that computes the op."""

    def run_cross(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        """Attend; returns [T, Hq, D] contiguous in q's dtype."""
        ...


def cross_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    backend: str,
) -> Tensor:
    """Attend to the first `seq_lens[t]` keys of row t's block table (arXiv:1706.03762, 3.2.3).

    Args:
        q: [T, Hq, D], last dimension contiguous.
        k_cache: [num_blocks, Hkv, block_size, D], as `paged_attention` takes it. Not changed.
        v_cache: like `k_cache`.
        seq_lens: [T] int32, at least 1.
        block_table: [T, E] int32, block ids by position // block_size.
        scale: factor on the logits, usually D ** -0.5.
        backend: the name of a backend that is a `CrossBackend`.

    Returns:
        [T, Hq, D] contiguous, in q's dtype.

    Raises:
        ValueError: the CPU kernel refused a shape, a dtype, a length or a block id.
    """
    return _op(q, k_cache, v_cache, seq_lens, block_table, scale, backend)


def write_cross_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, backend: str
) -> None:
    """Write keys and values in the layout of a backend.

    Args:
        k: [N, Hkv, D], last dimension contiguous.
        v: like `k`.
        k_cache: [num_blocks, Hkv, block_size, D], written in place.
        v_cache: like `k_cache`.
        slots: [N] int64, block id * block_size + offset of each entry.
        backend: the name of the backend that reads the caches.
    """
    whole = {"dtype": torch.int32, "device": k.device}
    # One sequence without query rows: all rows are padding, so nothing attends.
    metadata = AttentionMetadata(
        query_start_loc=torch.zeros(2, **whole),
        seq_lens=torch.zeros(1, **whole),
        block_table=torch.zeros((1, 1), **whole),
        slot_mapping=slots,
        plan=torch.ones(1, dtype=torch.int64),
    )
    paged_attention(k, k, v, k_cache, v_cache, metadata, scale=1.0, backend=backend)


def _kernel(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    backend: str,
) -> Tensor:
    chosen = load_backend(backend)
    assert isinstance(chosen, CrossBackend), "`AttentionBackend.why_unsupported` refuses the others"
    return chosen.run_cross(q, k_cache, v_cache, seq_lens, block_table, scale)


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    backend: str,
) -> Tensor:
    return q.new_empty(q.shape)


# Two ops for the reason that `ostinato.ops.attention` gives: the native library registers its own
# kernel for the first, and passes calls for other backends to the second.
_op, _ = (
    register_op(name, {"CompositeExplicitAutograd": _kernel}, fake=_fake)
    for name in ("cross_attention", "cross_attention_in_python")
)
