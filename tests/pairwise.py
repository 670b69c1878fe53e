"""Combinations of test parameters: few cases in which every pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest

__all__ = ("all_combinations", "pairwise")


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis in which every pair of values of two axes occurs.

    The same call gives the same cases in every process.
    """
    return [_values(axes, place) for place in _fewest(axes)]


def all_combinations(*axes: Sequence[Any], rare: Collection[Any] = ()) -> list[Any]:
    """Every combination of one value of each axis. Some are marked slow.

    These are the combinations outside of `pairwise`, and all with a value of `rare`.
    """
    common = [[place for place, value in enumerate(axis) if value not in rare] for axis in axes]
    often = {_values(common, place) for place in _fewest(common)}
    return [
        pytest.param(*_values(axes, place), marks=() if place in often else pytest.mark.slow)
        for place in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def _values(axes: Sequence[Sequence[Any]], place: Sequence[int]) -> tuple[Any, ...]:
    return tuple(axis[index] for axis, index in zip(axes, place, strict=True))


def _fewest(axes: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    """Cases as the places of values in their axes: the shortest list of four random attempts."""
    shuffled = random.Random(0)
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    attempts = []
    for _ in range(4):
        shuffled.shuffle(places)
        attempts.append(_greedy(places))
    return sorted(min(attempts, key=len))


def _greedy(places: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Cases of `places`, each with the most pairs that no case before it has."""
    pairs_of = {case: set(itertools.combinations(enumerate(case), 2)) for case in places}
    wanted = set[Any]().union(*pairs_of.values())
    chosen = []
    while wanted:
        best = max(places, key=lambda case: len(pairs_of[case] & wanted))
        wanted -= pairs_of[best]
        chosen.append(best)
    return chosen
