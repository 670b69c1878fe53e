"""The plan of a tensor-parallel rank: its part of weights and cache, one bundle for all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato.conf.compose import load_config
from ostinato.models.sharding import WHOLE, Shard
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.loading import open_bundle
from ostinato.runtime.startup.plan.engine_plan import make_plan
from tests.runtime.tiny import tiny_config


def test_a_rank_plans_for_its_part() -> None:
    config = load_config(["model=llama-45m", "cache.memory_gib=0.1"]).engine
    whole, *ranks = (
        make_plan(config, 1, shard=shard) for shard in (WHOLE, Shard(0, 2), Shard(1, 2))
    )
    first, second = (replace(rank.memory, free_bytes=0, budget_bytes=0) for rank in ranks)
    assert first == second  # free memory is measured for each plan
    for rank in ranks:
        assert 0.5 <= rank.memory.weights_bytes / whole.memory.weights_bytes < 0.8
        assert 2 * rank.kv_cache_spec.bytes_per_block == whole.kv_cache_spec.bytes_per_block
        assert 2 * rank.attention_spec.num_heads == whole.attention_spec.num_heads


def test_ranks_share_a_bundle() -> None:
    config = tiny_config("graphs.mode=compiled", "graphs.bundle=true").engine
    directories = []
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2)):
        bundle = open_bundle(make_plan(config, 1, shard=shard))
        assert bundle is not None
        directories.append(bundle.directory)
    assert directories[0] != directories[1] == directories[2]


def test_sizes_that_can_not_be_divided_end_the_start() -> None:
    config = load_config(["model=llama-45m"]).engine
    with pytest.raises(StartupError, match=r"parallel.tensor=5: num_attention_heads=8 cannot"):
        make_plan(config, 1, shard=Shard(0, 5))
    config = load_config(
        ["model=llama-45m", "model.quantization=int4", "model.quantization_group_size=256"]
    ).engine
    with pytest.raises(StartupError, match=r"parallel.tensor=4: weights as int4 .* groups of 256"):
        make_plan(config, 1, shard=Shard(0, 4))
