"""The metrics of the slower tiers of the KV cache. An engine without a tier has none of them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ostinato.runtime.types.engine_info import EngineStats

__all__ = ("loaded_tokens", "looked_up_tokens", "tier_families")

_PREFIX = "ostinato_kv_tier"
# Name of the metric -> its text, and the field of `TierStats`.
_GAUGES = {
    "places": ("KV blocks that the tier has room for.", "num_places"),
    "used_places": ("KV blocks that the tier holds.", "num_used_places"),
}
_COUNTERS = {
    "stored_blocks": ("Copies of KV blocks to the tier that were begun.", "num_stored_blocks"),
    "loaded_blocks": ("KV blocks that were loaded from the tier.", "num_loaded_blocks"),
    "evicted_blocks": ("Copies that were overwritten by others.", "num_evicted_blocks"),
    "failed_blocks": ("Copies that could not be written or read.", "num_failed_blocks"),
    "dropped_blocks": (
        "KV blocks that the device reused while they waited for their copy.",
        "num_dropped_blocks",
    ),
}
# Name of the metric -> its text, and the field of `EngineStats`.
_LOADS = {
    "loads": ("Loads of KV blocks from the tiers.", "num_tier_loads"),
    "refused_loads": (
        "Loads that were not begun, because computing was predicted to be faster.",
        "num_refused_tier_loads",
    ),
    "load_seconds": ("Seconds of the loads, summed.", "tier_load_seconds"),
}


def tier_families(stats: EngineStats) -> Iterator[Metric]:
    """The metrics of the tiers; none if the engine has no tier."""
    if not stats.tiers:
        return
    for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (text, field) in metrics.items():
            family = kind(f"{_PREFIX}_{name}", text, labels=["tier"])
            for tier, figures in stats.tiers.items():
                family.add_metric([tier], getattr(figures, field))
            yield family
    for name, (text, field) in _LOADS.items():
        yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=getattr(stats, field))


def loaded_tokens(stats: EngineStats, block_size: int) -> int:
    """Tokens of the blocks that were loaded from all tiers. A block has `block_size` tokens."""
    return block_size * sum(tier.num_loaded_blocks for tier in stats.tiers.values())


def looked_up_tokens(stats: EngineStats, block_size: int) -> int:
    """Tokens that were looked up in the tiers, because the device did not have them.

    `prefix_hits` includes the loaded tokens, as a load ends before its sequence is admitted.
    """
    return stats.prefix_queries - stats.prefix_hits + loaded_tokens(stats, block_size)
