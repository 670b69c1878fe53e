"""The sizes of multi-head latent attention, as data (models/block_parts/latent_attention.py)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("LatentSpec",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Keys and values are computed from one vector a token (DeepSeek-V2, arXiv:2405.04434).

    The rotated elements of a head come first. Those of a key are the same in every head.
    """

    query_rank: int  # of the vector that queries are computed from; 0 = from the hidden state
    kv_rank: int  # of the vector that keys and values are computed from
    rope_dim: int  # elements of a query and a key that are rotated
    is_interleaved: bool = True  # checkpoints store the two rows of a rotary pair side by side
    norm_eps: float = 1e-6  # of the norms of both vectors
