"""Statistics of samples: percentiles, means and deviations, bootstrap confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

__all__ = ("Interval", "bootstrap_ratio", "percentile", "summary")

Interval = tuple[float, float]
_RESAMPLES = 10_000


def percentile(
    values: Sequence[float] | np.ndarray, q: float, weights: np.ndarray | None = None
) -> float:
    """The q-th percentile, interpolated linearly as `numpy.percentile` does.

    Args:
        values: [n] in any order.
        q: in [0, 100].
        weights: [n] whole numbers: how often each value counts; None = each counts once.

    Raises:
        ValueError: there are no values.
    """
    if not len(values):
        raise ValueError("there are no values to take a percentile of")
    if weights is None:
        return float(np.percentile(values, q))
    order = np.argsort(values, kind="stable")
    ascending = np.asarray(values)[order]
    ends = np.cumsum(weights[order])  # value i has the ranks [ends[i] - weight, ends[i])
    rank = q / 100 * (ends[-1] - 1)
    low, high = (int(np.searchsorted(ends, r, side="right")) for r in (int(rank), -int(-rank // 1)))
    below, above = ascending[low], ascending[min(high, len(ascending) - 1)]
    return float(below + (rank - int(rank)) * (above - below))


def summary(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, std (of the population) and each percentile as `p99`; {} for no values."""
    if not values:
        return {}
    figures = {"mean": statistics.fmean(values), "std": statistics.pstdev(values)}
    figures |= {f"p{q:g}": percentile(values, q) for q in percentiles}
    return figures


def bootstrap_ratio(
    ours: Sequence[float], reference: Sequence[float], *, seed: int = 0, level: float = 0.95
) -> tuple[float, Interval]:
    """The geometric mean of paired ratios and its bootstrap percentile interval (Efron 1979).

    Args:
        ours: one figure of each round.
        reference: the reference's figures of the same rounds. Effects of the machine's state in a
            round cancel in the ratio.
        seed: seed of the resamples.
        level: share of the resamples within the interval.

    Raises:
        ValueError: the rounds do not match, there are none, or a figure is not above 0.
    """
    if len(ours) != len(reference) or not ours:
        raise ValueError(f"{len(ours)} and {len(reference)} rounds cannot be compared")
    if min(*ours, *reference, math.inf) <= 0:
        raise ValueError("ratios need figures above 0")
    logs = np.log(np.asarray(ours)) - np.log(np.asarray(reference))
    draws = np.random.default_rng(seed).integers(0, len(logs), (_RESAMPLES, len(logs)))
    means = logs[draws].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(np.exp(logs.mean())), (float(np.exp(low)), float(np.exp(high)))
