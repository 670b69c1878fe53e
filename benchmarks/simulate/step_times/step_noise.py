"""Models a server's step times relative to the step-cost table: the usual ratio, and its noise.

The table is measured in a few seconds by an engine that runs alone, and single entries may be wrong
by a third. So the usual ratio is a curve over prompt tokens and decoding sequences, fitted to
measured steps. The noise is each step's ratio divided by the usual ratio, in the order of time. It
is correlated: neighbouring steps had a correlation of 0.5, and in some seconds every prompt took
1.4 times as long. If noise were drawn independently for each step, every simulated run would
contain such slow steps, and its tail latency would be that of the worst measured run.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ("Curve", "NoiseSampler", "SeenStep", "StepRatios", "fit_ratios")

Curve = tuple[tuple[int, float], ...]  # (number, logarithm of a ratio), numbers rising

# Weights of the differences between neighbouring points, where a step has weight 1.
_SMOOTH_TOKENS, _SMOOTH_SEQS = 2.0, 10.0
_ROUNDS = 30
_LEAST_RESIDUAL = 0.02  # smaller distances from the curve are squared
_MEAN_RUN = 256  # mean number of steps drawn in succession, about a second


class SeenStep(NamedTuple):
    """A measured step."""

    number: int  # among all measured steps
    num_prompt_tokens: int
    num_decodes: int  # sequences
    ratio: float  # its seconds / the table's seconds


class StepRatios(NamedTuple):
    """The ratio of step times to the table: exp(sum of the curves) times one of `spread`."""

    tokens: Curve  # by prompt tokens; empty = none
    seqs: Curve  # by 1 + decoding sequences
    spread: tuple[float, ...]  # noise factors near 1, in the order of time; at least one
    order: tuple[int, ...]  # the numbers of these steps among all measured steps, rising

    def usual(self, num_prompt_tokens: int, num_decodes: int) -> float:
        """The ratio without noise."""
        return math.exp(_at(self.tokens, num_prompt_tokens) + _at(self.seqs, 1 + num_decodes))


class NoiseSampler:
    """Draws noise for several kinds of steps by the stationary bootstrap.

    The method is that of Politis and Romano (1994). It moves through the measured noise of all
    kinds in the order of time, and sometimes jumps to another time.
    """

    def __init__(self, kinds: Sequence[StepRatios], numbers: random.Random) -> None:
        self._kinds, self._numbers = kinds, numbers
        self._end = 1 + max(kind.order[-1] for kind in kinds)
        self._jump()

    def next(self, kind: int) -> float:
        """The next noise factor of the kind with this index."""
        if self._numbers.random() * _MEAN_RUN < 1.0:
            self._jump()
        spread = self._kinds[kind].spread
        place = self._places[kind] % len(spread)
        self._places[kind] = place + 1
        return spread[place]

    def _jump(self) -> None:
        number = self._numbers.randrange(self._end)
        self._places = [bisect_left(kind.order, number) for kind in self._kinds]


def fit_ratios(steps: Sequence[SeenStep]) -> StepRatios:
    """Fit curves through the medians of steps of one kind (with prompts, or without).

    It minimises the absolute distances of logarithms, by iteratively reweighted least squares.
    Differences between neighbouring points of a curve are penalised, for points with few steps.

    Args:
        steps: at least one step, in the order of time.
    """
    tokens = _points([one.num_prompt_tokens for one in steps])
    seqs = _points([1 + one.num_decodes for one in steps])
    parts = [_shares(seqs, [1 + one.num_decodes for one in steps])]
    if tokens:
        # One of the curves begins at 0, because only their sum is determined.
        parts = [_shares(tokens, [one.num_prompt_tokens for one in steps]), parts[0][:, 1:]]
    shares = np.concatenate(parts, axis=1)
    wanted = np.log([one.ratio for one in steps])
    jumps = _jumps(len(tokens), len(seqs))
    weights = np.ones(len(steps))
    values = np.zeros(shares.shape[1])
    for _ in range(_ROUNDS):
        # A small weight on all values, for points without steps near them.
        square = (shares.T * weights) @ shares + jumps.T @ jumps + 1e-9 * np.eye(len(values))
        values = np.linalg.solve(square, shares.T @ (weights * wanted))
        weights = 1.0 / np.maximum(np.abs(wanted - shares @ values), _LEAST_RESIDUAL)
        weights /= weights.mean()
    found = [float(one) for one in values]
    spread = tuple(float(one) for one in np.exp(wanted - shares @ values))
    order = tuple(one.number for one in steps)
    if not tokens:
        return StepRatios((), _curve(seqs, found), spread, order)
    of_seqs = [0.0, *found[len(tokens) :]]
    return StepRatios(_curve(tokens, found), _curve(seqs, of_seqs), spread, order)


def _points(numbers: Sequence[int]) -> list[int]:
    """Powers of two between the smallest and the largest number; empty if all are 0."""
    low, high = max(1, min(numbers)), max(numbers)
    if not high:
        return []
    return [1 << power for power in range(round(math.log2(low)), round(math.log2(high)) + 1)]


def _shares(points: Sequence[int], numbers: Sequence[int]) -> np.ndarray:
    """[numbers, points]: weights of linear interpolation in log2 between the points."""
    places = np.log2(np.maximum(numbers, 1))
    units = np.eye(len(points))
    return np.stack([np.interp(places, np.log2(points), unit) for unit in units], axis=1)


def _jumps(num_tokens: int, num_seqs: int) -> np.ndarray:
    """[differences, values]: weighted differences of neighbouring points of each curve."""
    of_tokens = math.sqrt(_SMOOTH_TOKENS) * np.diff(np.eye(num_tokens), axis=0)
    of_seqs = math.sqrt(_SMOOTH_SEQS) * np.diff(np.eye(num_seqs), axis=0)
    if not num_tokens:
        return of_seqs
    of_seqs = of_seqs[:, 1:]  # the first point is 0
    right = np.zeros((len(of_tokens), of_seqs.shape[1]))
    left = np.zeros((len(of_seqs), num_tokens))
    return np.block([[of_tokens, right], [left, of_seqs]])


def _curve(points: Sequence[int], values: Sequence[float]) -> Curve:
    return tuple((point, float(one)) for point, one in zip(points, values, strict=False))


def _at(curve: Curve, number: int) -> float:
    """The curve's value: linear in log2 of the number, constant beyond the ends."""
    if not curve:
        return 0.0
    index = bisect_right(curve, number, key=lambda one: one[0])
    if not 0 < index < len(curve):
        return curve[min(index, len(curve) - 1)][1]
    (low, before), (high, after) = curve[index - 1 : index + 1]
    return before + (after - before) * math.log2(number / low) / math.log2(high / low)
