"""Figures of samples: percentiles, summaries, confidence intervals.

The load client imports this: at the top the standard library only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ("Interval", "bootstrap_ratio", "percentile", "summary")

Interval = tuple[float, float]
_RESAMPLES = 10_000


def percentile(values: Sequence[float], q: float) -> float:
    """Of ascending values, by linear interpolation between neighbours; q in [0, 100].

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a percentile of no values")
    place = (len(values) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def summary(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, std (of the population) and each percentile as `p99`; {} for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    figures = {"mean": statistics.fmean(ordered), "std": statistics.pstdev(ordered)}
    figures |= {f"p{q:g}": percentile(ordered, q) for q in percentiles}
    return figures


def bootstrap_ratio(
    ours: Sequence[float], reference: Sequence[float], *, seed: int = 0, level: float = 0.95
) -> tuple[float, Interval]:
    """The geometric mean of paired ratios and its bootstrap percentile interval (Efron 1979).

    Args:
        ours: one figure of each round.
        reference: the other's, of the same rounds: what a round's machine state does to both
            cancels.
        level: share of the resamples within the interval.

    Raises:
        ValueError: the rounds do not match, there are none, or a figure is not above 0.
    """
    import numpy as np  # not for the load client, which needs the rest alone

    if len(ours) != len(reference) or not ours:
        raise ValueError(f"{len(ours)} and {len(reference)} rounds can not be compared")
    if min(*ours, *reference, math.inf) <= 0:
        raise ValueError("ratios need figures above 0")
    logs = np.log(np.asarray(ours)) - np.log(np.asarray(reference))
    draws = np.random.default_rng(seed).integers(0, len(logs), (_RESAMPLES, len(logs)))
    means = logs[draws].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(np.exp(logs.mean())), (float(np.exp(low)), float(np.exp(high)))
