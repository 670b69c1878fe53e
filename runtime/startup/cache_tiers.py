"""Builds the slower tiers of the KV cache: the index, each rank's copies, the engine's part."""

from __future__ import annotations

from ostinato.conf.schema import LoadFormat
from ostinato.models.kv_cache import KVCache
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.engine.tier_copies import TierCopies
from ostinato.runtime.execution.executor import Executor
from ostinato.runtime.kv.load_costs import LoadCosts
from ostinato.runtime.kv.tier_index import TierIndex
from ostinato.runtime.memory.memory_plan import GIB
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.startup.plan.engine_plan import EnginePlan
from ostinato.runtime.startup.served_model import compute_identity
from ostinato.runtime.tiers.rank_tiers import RankTiers
from ostinato.runtime.tiers.tier_calls import num_buffers
from ostinato.runtime.tiers.tier_opening import TierOpening

__all__ = ("make_index", "make_rank_tiers", "make_tier_copies")

_OPENING_S = 1.0  # how long the start waits for the directory, if no weights have to be read


def make_index(plan: EnginePlan, costs: CostTable | None) -> TierIndex | None:
    """The index of the tiers; None if no tier is configured."""
    cache = plan.config.cache
    if not cache.has_tiers:
        return None
    block_bytes = plan.kv_cache_spec.bytes_per_block
    return TierIndex(
        block_bytes=block_bytes,
        costs=LoadCosts(costs, block_bytes, cache.block_size),
        num_host_places=plan.num_host_places,
        expects_disk=bool(cache.disk_dir),
        policy=cache.store,
        stores_salted=cache.store_salted,
    )


def make_rank_tiers(plan: EnginePlan, kv_cache: KVCache) -> RankTiers:
    """The copies of one rank, if a tier is configured."""
    return RankTiers(
        kv_cache,
        num_host_places=plan.num_host_places,
        has_disk=bool(plan.config.cache.disk_dir),
        rank=plan.source.shard.rank,
    )


def make_tier_copies(
    plan: EnginePlan, executor: Executor, scheduler: Scheduler, index: TierIndex
) -> TierCopies:
    """The engine's part. The directory of the disk is opened now, or after a while on a thread."""
    cache, source = plan.config.cache, plan.source
    opening = None
    if cache.disk_dir:
        is_dummy = plan.config.model.load_format is LoadFormat.dummy
        shard = source.shard
        identity = {
            **compute_identity(plan),
            "block": f"{plan.kv_cache_spec.bytes_per_block} bytes, {cache.block_size} tokens",
            "ranks": f"{shard.num_ranks} in {shard.stage.count} stages",
        }
        opening = TierOpening(
            cache.disk_dir,
            identity,
            () if is_dummy else source.checkpoint.weight_files(),
            int(cache.disk_gib * GIB),
        )
        opening.wait_if_short(_OPENING_S)
    copies = TierCopies(
        executor,
        scheduler,
        index,
        opening,
        num_disk_places=plan.num_disk_places,
        num_buffers=num_buffers(plan.kv_cache_spec.bytes_per_block),
    )
    copies.advance(waits=False)
    return copies
