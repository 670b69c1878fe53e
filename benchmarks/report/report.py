"""Medians with their ranges, as text for tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ("summary",)


def summary(values: Sequence[float]) -> str:
    """Median, and the range when there is one, in about three digits: "42.1 [40.0-43.0]"."""
    median = statistics.median(values)
    digits = 0 if median >= 1000 else 1 if median >= 10 else 2
    middle = f"{median:,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):,.{digits}f}-{max(values):,.{digits}f}]"
