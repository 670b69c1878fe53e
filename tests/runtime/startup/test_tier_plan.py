"""The memory plan has the memory that the copies of KV blocks in slower tiers take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.models.sharding import Shard
from ostinato.runtime.startup.plan.engine_plan import EnginePlan, make_plan
from ostinato.runtime.startup.rank_group import agree
from ostinato.runtime.tiers.rank_tiers import RankTiers
from tests.runtime.tiny import tiny_config

SHARDS = [Shard(0, 1), Shard(0, 2), Shard(1, 2)]


def plan_of(shard: Shard, *words: str) -> EnginePlan:
    return make_plan(tiny_config("device.name=cpu", *words).engine, 1, shard=shard)


def allocated_bytes(plan: EnginePlan) -> int:
    """Bytes of all tensors that the copies of a rank allocate."""
    kv_cache = plan.kv_cache_spec.allocate(3, torch.device("cpu"))
    tiers = RankTiers(kv_cache, num_host_places=plan.num_host_places, has_disk=True)
    try:
        lists = [value for value in vars(tiers).values() if isinstance(value, list)]
        return sum(one.nbytes for values in lists for one in values if isinstance(one, Tensor))
    finally:
        tiers.close()


@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize("block_size", [8, 128])
def test_buffers_of_a_cpu_are_in_the_ledger(shard: Shard, block_size: int, tmp_path: Path) -> None:
    words = (f"cache.block_size={block_size}", f"cache.disk_dir={tmp_path}")
    plan, alone = plan_of(shard, *words), plan_of(shard, words[0])
    assert plan.memory.tier_bytes == allocated_bytes(plan) > 0
    assert alone.memory.tier_bytes == 0
    assert plan.memory.fixed_bytes == alone.memory.fixed_bytes + plan.memory.tier_bytes
    assert list(tmp_path.iterdir()) == []


def test_what_each_rank_reports_has_the_buffers(tmp_path: Path) -> None:
    plan = plan_of(SHARDS[0], f"cache.disk_dir={tmp_path}")
    _, (info,) = agree(plan, lambda name, numbers: [numbers])
    assert info.memory_bytes == plan.memory.fixed_bytes + plan.memory.kv_bytes
