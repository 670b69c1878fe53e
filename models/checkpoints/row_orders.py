"""Row orders: how the rows of a stored matrix are permuted when it is loaded.

Checkpoints interleave queries, keys and values, or the two halves of a rotary pair, in several
ways. The model code has one layout: all queries, then all keys, then all values, each head with the
first halves of its rotary pairs before the second halves. A row order is a tensor [rows] int64: for
every row of our matrix the number of the stored row.

If queries and keys are permuted in the same way, their products do not change. Weights that are
applied per head after the projection (q_norm, k_norm) must be permuted likewise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.recurrent_spec import DeltaSpec

__all__ = (
    "gated_delta_orders",
    "gated_queries",
    "grouped_parts",
    "interleaved_queries_and_keys",
    "interleaved_rope",
    "per_group_qkv",
    "per_head_qkv",
    "rotated_last",
)


def per_head_qkv(num_heads: int, head_dim: int) -> Tensor:
    """Stored as [heads, (q, k, v), head_dim]: GPT-NeoX, BLOOM, Falcon-RW."""
    return per_group_qkv(num_heads, num_heads, head_dim)


def per_group_qkv(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Stored as [kv_heads, (queries of the group, k, v), head_dim]: Falcon's new architecture."""
    group = num_heads // num_kv_heads
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim)
    rows = rows.view(num_kv_heads, group + 2, head_dim)
    sides = (rows[:, :group], rows[:, group], rows[:, group + 1])
    return torch.cat([side.reshape(-1) for side in sides])


def interleaved_rope(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Each head's rotary pairs stored side by side: GLM-4, Cohere, GPT-J, CodeGen, Llama 4.

    Args:
        num_heads: heads of the stored matrix.
        head_dim: rows of a head.
        rotary_dim: the rows at the head's beginning that are rotated; even.
    """
    rotated = torch.arange(rotary_dim).view(-1, 2).t().reshape(-1)
    head = torch.cat([rotated, torch.arange(rotary_dim, head_dim)])
    return (torch.arange(num_heads)[:, None] * head_dim + head).view(-1)


def interleaved_queries_and_keys(config: ModelConfig) -> tuple[tuple[str, Tensor], ...]:
    """`CheckpointLayout.row_orders` for q_proj and k_proj that are stored as `interleaved_rope`."""
    assert config.rope is not None, "only heads that rotate have rotary pairs"
    return tuple(
        (name, interleaved_rope(count, config.head_dim, config.rope.rotary_dim))
        for name, count in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads))
    )


def rotated_last(
    num_heads: int, head_dim: int, rotary_dim: int, *, is_interleaved: bool = True
) -> Tensor:
    """Each head's rotated rows stored after its other rows: DeepSeek.

    Args:
        num_heads: heads of the stored matrix.
        head_dim: rows of a head.
        rotary_dim: the rows at the head's end that are rotated; even.
        is_interleaved: their pairs are stored side by side.
    """
    rotated = torch.arange(rotary_dim)
    if is_interleaved:
        rotated = rotated.view(-1, 2).t().reshape(-1)
    first = head_dim - rotary_dim
    head = torch.cat([first + rotated, torch.arange(first)])
    return (torch.arange(num_heads)[:, None] * head_dim + head).view(-1)


def grouped_parts(num_groups: int, *sizes: int) -> Tensor:
    """Stored as [groups, parts of these rows]; our matrix has each part by itself."""
    rows = torch.arange(num_groups * sum(sizes)).view(num_groups, sum(sizes))
    return torch.cat([part.reshape(-1) for part in rows.split(sizes, 1)])


def gated_queries(num_heads: int, head_dim: int) -> Tensor:
    """Stored as [heads, (query, gate), head_dim]; our matrix has the gates of all heads first."""
    queries, gates = grouped_parts(num_heads, head_dim, head_dim).chunk(2)
    return torch.cat([gates, queries])


def gated_delta_orders(spec: DeltaSpec) -> tuple[tuple[str, Tensor], ...]:
    """`CheckpointLayout.row_orders` for the projections of a gated delta net in Qwen3-Next.

    They are stored by heads of keys: for each of them its queries, keys, values and gates.
    """
    count = spec.num_v_heads // spec.num_k_heads  # heads of values that share a head of keys
    keys, values = spec.k_dim, count * spec.v_dim
    return (
        ("mixer.in_proj", grouped_parts(spec.num_k_heads, keys, keys, values, values)),
        ("mixer.gates", grouped_parts(spec.num_k_heads, count, count)),
    )
