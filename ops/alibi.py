"""The slopes of ALiBi, attention with linear biases (Press et al., arXiv:2108.12409)."""

from __future__ import annotations

__all__ = ("alibi_slopes",)


def alibi_slopes(num_heads: int, *, bias_max: float = 8.0, scale: float = 1.0) -> tuple[float, ...]:
    """The slope of each head. A logit falls by the slope for each token between query and key.

    If H is a power of two, head i (1 to H) has the slope `2 ** (-bias_max * i / H)`. For another H,
    the first slopes are those of the largest power of two below H. The remaining slopes are every
    second one of the smallest power of two above H (section 3 of the paper, and its authors' code).

    Args:
        num_heads: H.
        bias_max: the last head's slope is `2 ** -bias_max`.
        scale: factor on all slopes.
    """
    below = 1 << (num_heads.bit_length() - 1)

    def geometric(count: int) -> list[float]:
        return [scale * 2.0 ** (-bias_max * (head + 1) / count) for head in range(count)]

    return (*geometric(below), *geometric(2 * below)[::2][: num_heads - below])
