"""Rotary position embedding (Su et al., arXiv:2104.09864): the tables and the rotation.

The rotation is the op `ostinato::rotate_heads` on CPUs, and plain torch on other devices (see
ops/norm.py).

The tables hold one entry per rotated *pair* of elements. A pair is the elements `i` and
`i + rotary_dim / 2` of a head, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.ops.norm import plain_rms_norm
from ostinato.ops.register import by_device, register_op

__all__ = (
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Rope",
    "YarnScaling",
    "apply_rope",
    "inverse_frequencies",
    "join_heads",
    "rope_tables",
    "rotate_heads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation (arXiv:2306.15595): all positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, others blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): stretches the pairs that turn rarely in the original context."""

    factor: float
    original_max_position: int
    attention_factor: float  # factor on cosines and sines: the temperature of the attention logits
    beta_fast: float = 32.0  # turns above which a dimension keeps its frequency
    beta_slow: float = 1.0  # turns below which a dimension is stretched by `factor`
    truncate: bool = True  # round the borders of the blend to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): each pair of elements has its own divisor of the frequency.

    There are two sets of divisors. The longest context that an engine serves decides once which set
    the engine uses. If the length of each sequence decided, the cached keys of a sequence would be
    wrong as soon as it outgrew the original context.
    """

    short_factors: tuple[float, ...]  # [rotary_dim / 2], for contexts up to the original length
    long_factors: tuple[float, ...]  # [rotary_dim / 2], for longer contexts
    original_max_position: int
    attention_factor: float  # factor on cosines and sines


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotary embedding of a model."""

    rotary_dim: int  # leading elements of each head that are rotated; even
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None


def inverse_frequencies(rope: Rope, num_positions: int) -> Tensor:
    """Radians per position of each rotated pair.

    Args:
        rope: the rotary embedding.
        num_positions: positions of the longest context.

    Returns:
        [rotary_dim / 2] float32 on the CPU.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device="cpu")
    inverse = 1.0 / (rope.theta ** (exponents / rope.rotary_dim))
    match rope.scaling:
        case None:
            return inverse
        case LinearScaling(factor=factor):
            return inverse / factor
        case Llama3Scaling() as scaling:
            return _llama3(inverse, scaling)
        case YarnScaling() as scaling:
            return _yarn(inverse, rope, scaling)
        case LongRopeScaling() as scaling:
            is_long = num_positions > scaling.original_max_position
            factors = scaling.long_factors if is_long else scaling.short_factors
            return inverse / torch.tensor(factors, dtype=torch.float32, device="cpu")


def _llama3(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # turns of each pair within the original context
    turns = scaling.original_max_position * inverse / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inverse / scaling.factor + keep * inverse


def _yarn(inverse: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    def pair_with(turns: float) -> float:
        """The (fractional) index of the pair that turns this often within the original context."""
        wavelength_ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    pairs = torch.arange(inverse.numel(), dtype=torch.float32, device="cpu")
    stretch = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretch * inverse / scaling.factor + (1 - stretch) * inverse


def rope_tables(
    rope: Rope, num_positions: int, device: torch.device | None = None, *, num_extra: int = 0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position.

    Args:
        rope: the rotary embedding.
        num_positions: positions of the longest context.
        device: where to make them; "meta" gives shapes only.
        num_extra: further positions, which do not make the context longer.

    Returns:
        cos, sin: [num_positions + num_extra, rotary_dim / 2] float32 each.
    """
    if device is not None and device.type == "meta":
        # Arithmetic on this device would import torch's compiler, which takes seconds.
        shape = (num_positions + num_extra, rope.rotary_dim // 2)
        cos, sin = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        return cos, sin
    positions = torch.arange(num_positions + num_extra, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inverse_frequencies(rope, num_positions).to(positions.device))
    scale = 1.0
    if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        scale = rope.scaling.attention_factor
    return angles.cos() * scale, angles.sin() * scale


def rotate_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_q_heads: int,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate the heads of a step's queries and keys, after an optional RMS norm of each head.

    Args:
        x: [T, H, D], last dimension contiguous: query heads, then key heads.
        cos: [T, R / 2] float32, table rows at the tokens' positions; R <= D elements are rotated.
        sin: like `cos`.
        num_q_heads: how many of the H heads are queries.
        q_weight: [D] in x's dtype or float32, scale of the query heads' RMS norm; None = no norm.
        k_weight: the same for the keys' heads.
        eps: both norms add it to the mean square.

    Returns:
        [T, H, D] contiguous, in x's dtype, computed in float32.
    """
    return _rotate_heads(x, cos, sin, q_weight, k_weight, num_q_heads, eps)


def join_heads(shared: Tensor, heads: Tensor) -> Tensor:
    """Put the rotated elements, which all key heads share, in front of each head's own elements.

    This is the layout of keys in DeepSeek-V2 (arXiv:2405.04434).

    Args:
        shared: [T, 1, A], last dimension contiguous: the first elements of every head.
        heads: [T, H, B] in the same dtype, last dimension contiguous: the other elements.

    Returns:
        [T, H, A + B] contiguous.
    """
    return _join_heads(shared, heads)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading elements of every head.

    Args:
        x: [T, H, D].
        cos: [T, R / 2] float32, table rows at the tokens' positions; R <= D elements are rotated.
        sin: like `cos`.

    Returns:
        [T, H, D] in x's dtype, computed in float32.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    # Each half is rounded on its own, so that a compiler can write it directly into the result.
    rotated = [
        (first * cos - second * sin).to(x.dtype),
        (second * cos + first * sin).to(x.dtype),
    ]
    if 2 * half < x.shape[-1]:
        rotated.append(x[..., 2 * half :])
    return torch.cat(rotated, dim=-1)


def _plain_rotate_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_q_heads: int,
    eps: float,
) -> Tensor:
    q, k = x[:, :num_q_heads], x[:, num_q_heads:]
    if q_weight is not None:
        q = plain_rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = plain_rms_norm(k, k_weight, eps)
    return torch.cat((apply_rope(q, cos, sin), apply_rope(k, cos, sin)), dim=1)


def _rotate_heads_fake(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_q_heads: int,
    eps: float,
) -> Tensor:
    return x.new_empty(x.shape)


_rotate_heads = by_device(
    register_op(
        "rotate_heads", {"CompositeExplicitAutograd": _plain_rotate_heads}, fake=_rotate_heads_fake
    ),
    _plain_rotate_heads,
)


def _plain_join_heads(shared: Tensor, heads: Tensor) -> Tensor:
    return torch.cat((shared.expand(-1, heads.shape[1], -1), heads), dim=-1)


def _join_heads_fake(shared: Tensor, heads: Tensor) -> Tensor:
    return heads.new_empty((*heads.shape[:2], shared.shape[2] + heads.shape[2]))


_join_heads = by_device(
    register_op(
        "join_heads", {"CompositeExplicitAutograd": _plain_join_heads}, fake=_join_heads_fake
    ),
    _plain_join_heads,
)
