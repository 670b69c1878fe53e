"""Sampling from logits in plain torch: penalties, bitmasks, top-k, top-p, min-p.

Each row is treated by itself. The caller draws a row's random number from (seed, position). So a
row's token depends on its own logits and request, not on the batch, and can be reproduced.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

__all__ = (
    "MAX_CANDIDATES",
    "apply_penalties",
    "apply_token_bitmask",
    "sample_candidates",
    "sample_filtered",
    "sample_full",
    "sample_sorted",
    "uniform_number",
)

# For top-p, for min-p and for a top-k of at most this number, this many of the likeliest tokens are
# looked at. If they do not suffice, the whole vocabulary is sorted.
MAX_CANDIDATES = 512


def uniform_number(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the position only, not on earlier calls."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Penalise one row in place.

    Args:
        logits: [V] float32.
        counts: [V] int32, how often each token was generated.
        in_prompt: [V] bool, which tokens the prompt holds.
        repetition: divides positive and multiplies negative logits of tokens that were generated or
            are in the prompt (Keskar et al. 2019, CTRL).
        presence: subtracted once from each generated token.
        frequency: subtracted per occurrence of each generated token.
    """
    generated = counts > 0
    if repetition != 1.0:
        seen = generated | in_prompt
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen, scaled, logits))
    if frequency:
        logits.sub_(counts, alpha=frequency)
    if presence:
        logits.sub_(generated.to(logits.dtype), alpha=presence)


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Make tokens whose bit is 0 impossible, in place.

    Args:
        logits: [R, V] float32.
        rows: [C] int64, the rows that have a mask, each row once.
        bits: [C, W] int32 with W * 32 >= V; token t is bit t % 32 of word t // 32.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> shifts & 1).view(len(bits), -1)[:, : logits.shape[-1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


def sample_full(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample from the whole vocabulary by inverting the cumulative distribution.

    Args:
        logits: [R, V] float32, temperature applied, -inf = impossible.
        uniforms: [R] float64 in [0, 1).

    Returns:
        [R] int64 token ids.
    """
    # float64: a float32 running sum over 150,000 terms loses the likelihoods of rare tokens.
    cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    return _invert(cumulative, uniforms)


def sample_filtered(
    logits: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Sample after top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024).

    The whole vocabulary is sorted only if a row without top-k needs more than the likeliest tokens
    that were looked at. The host waits for the device to find out. `sample_sorted` does not wait.

    Args:
        logits: [R, V] float32, temperature applied.
        uniforms: [R] float64 in [0, 1).
        top_k: [R] whole numbers of any type; V = off.
        top_p: [R] float64 in (0, 1]; 1 = off.
        min_p: [R] float64 in [0, 1]; 0 = off.

    Returns:
        [R] int64 token ids.
    """
    vocabulary = logits.shape[-1]
    limited = top_k < vocabulary
    width = min(vocabulary, max(MAX_CANDIDATES, int(torch.where(limited, top_k, 0).max())))
    values, ids = logits.topk(width, sorted=True)
    total = logits.double().logsumexp(-1, keepdim=True)
    mass = values.double().sub_(total).exp_()
    if width < vocabulary:
        # Rows without top-k need enough candidates to reach their top-p mass or min-p threshold.
        enough = limited | (mass.sum(-1) >= top_p) & (top_p < 1.0)
        enough |= (mass[:, -1] < mass[:, 0] * min_p) & (min_p > 0.0)
        if not bool(enough.all()):
            values, ids = logits.sort(-1, descending=True)
            mass = values.double().sub_(total).exp_()
    return _draw_ordered(mass, ids, limited, uniforms, top_k, top_p, min_p)


def sample_candidates(
    logits: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """`sample_filtered` of rows that all have a top-k of at most MAX_CANDIDATES; no host wait."""
    values, ids = logits.topk(min(logits.shape[-1], MAX_CANDIDATES), sorted=True)
    mass = values.softmax(-1, dtype=torch.float64)
    limited = torch.ones_like(top_k, dtype=torch.bool)
    return _draw_ordered(mass, ids, limited, uniforms, top_k, top_p, min_p)


def sample_sorted(
    logits: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """`sample_filtered` for any row by sorting the vocabulary, with fixed shapes; no host wait."""
    values, ids = logits.sort(-1, descending=True)
    mass = values.softmax(-1, dtype=torch.float64)
    del values
    limited = top_k < logits.shape[-1]
    return _draw_ordered(mass, ids, limited, uniforms, top_k, top_p, min_p)


def _draw_ordered(
    mass: Tensor,
    ids: Tensor,
    limited: Tensor,
    uniforms: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Draw one id of each row.

    Args:
        mass: [R, W] float64, the likelihoods of the candidates, greatest first; overwritten.
        ids: [R, W] int64, the candidates.
        limited: [R] bool, whether top-k leaves less than the vocabulary. The remaining likelihoods
            are then divided by their sum before top-p.
        uniforms, top_k, top_p, min_p: as for `sample_filtered`.
    """
    rank = torch.arange(mass.shape[-1], device=mass.device)
    mass.masked_fill_(rank >= top_k[:, None], 0.0)
    mass /= torch.where(limited[:, None], mass.sum(-1, keepdim=True), 1.0)
    before = mass.cumsum(-1).sub_(mass)
    mass.masked_fill_((before >= top_p[:, None]) & (rank > 0), 0.0)
    del before
    mass.masked_fill_(mass < mass[:, :1] * min_p[:, None], 0.0)
    choice = _invert(mass.cumsum_(-1), uniforms)
    return ids.gather(-1, choice[:, None]).squeeze(-1)


def _invert(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds uniform x total and whose mass is not zero."""
    target = uniforms[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.minimum(index, last)
