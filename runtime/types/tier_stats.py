"""Figures of the slower tiers of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ("TierStats", "continued_tiers", "sum_tiers")


class TierStats(msgspec.Struct, array_like=True, gc=False):
    """Figures of one tier, in blocks. All but the first two count since the start."""

    num_places: int = 0
    num_used_places: int = 0
    num_stored_blocks: int = 0  # copies that were begun
    num_loaded_blocks: int = 0
    num_evicted_blocks: int = 0  # copies that were overwritten by others
    num_failed_blocks: int = 0  # copies that could not be written or read back
    num_dropped_blocks: int = 0  # blocks that waited for a copy when the device reused them


def sum_tiers(stats: Iterable[dict[str, TierStats]]) -> dict[str, TierStats]:
    """Add the figures of several engines, tier by tier."""
    sums: dict[str, TierStats] = {}
    for one in stats:
        for name, tier in one.items():
            before = msgspec.structs.astuple(sums.get(name, TierStats()))
            numbers = zip(before, msgspec.structs.astuple(tier), strict=True)
            sums[name] = TierStats(*(a + b for a, b in numbers))
    return sums


def continued_tiers(
    before: dict[str, TierStats], now: dict[str, TierStats]
) -> dict[str, TierStats]:
    """Add the counters of an old engine to the figures of the new one after a restart."""
    sums = sum_tiers([before, now])
    for name, tier in sums.items():
        present = now.get(name, TierStats())
        tier.num_places, tier.num_used_places = present.num_places, present.num_used_places
    return sums
