"""The sizes of multi-head latent attention, as data (models/layers/mixers/latent_attention.py)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("LatentSpec",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Keys and values are computed from one vector for each token (DeepSeek-V2, arXiv:2405.04434).

    In this code the rotated elements of a head come first; checkpoints store them last. All heads
    of a token's key have the same rotated elements.
    """

    # size of the vector from which queries are computed; 0 = the hidden state itself
    query_rank: int
    kv_rank: int  # size of the vector from which keys and values are computed
    rope_dim: int  # elements of a query and a key that are rotated
    is_interleaved: bool = True  # checkpoints store the two rows of a rotary pair side by side
    norm_eps: float = 1e-6  # of the norms of both vectors
