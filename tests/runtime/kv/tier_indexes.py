"""Indexes of tiers whose blocks have contents with small numbers."""

from __future__ import annotations

from ostinato.conf.sections.cache_schema import StorePolicy
from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.kv.load_costs import LoadCosts
from ostinato.runtime.kv.tier_index import TierIndex

LEAST_BYTES = 4 << 20  # of the copies that any step may make


def hash_of(content: int) -> BlockHash:
    return BlockHash(bytes([content]) * 32)


def make_index(
    *,
    num_host_places: int = 0,
    expects_disk: bool = False,
    num_per_step: int = 8,
    policy: StorePolicy = StorePolicy.prompts,
    stores_salted: bool = False,
) -> TierIndex:
    block_bytes = LEAST_BYTES // num_per_step
    return TierIndex(
        block_bytes=block_bytes,
        costs=LoadCosts(None, block_bytes, 4),
        num_host_places=num_host_places,
        expects_disk=expects_disk,
        policy=policy,
        stores_salted=stores_salted,
    )
