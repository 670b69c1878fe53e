"""The metrics of the slower tiers of the KV cache, under our names and vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ostinato.api.observability.engine_metrics import EngineCollector
from ostinato.api.observability.tier_metrics import loaded_tokens, looked_up_tokens
from ostinato.runtime.types.engine_info import EngineStats, ReplicaState, ReplicaStatus
from ostinato.runtime.types.tier_stats import TierStats
from tests.api.fake_client import FakeClient

HOST = TierStats(10, 4, 7, 3, 2, 1, 5)
DISK = TierStats(100, 40, 70, 30, 20, 11, 6)
STATS = EngineStats(
    prefix_queries=2000,
    prefix_hits=900,
    tiers={"host": HOST, "disk": DISK},
    num_tier_loads=8,
    num_refused_tier_loads=9,
    tier_load_seconds=1.5,
)
# Name of the metric -> field of `TierStats`.
BY_TIER = {
    "places": "num_places",
    "used_places": "num_used_places",
    "stored_blocks_total": "num_stored_blocks",
    "loaded_blocks_total": "num_loaded_blocks",
    "evicted_blocks_total": "num_evicted_blocks",
    "failed_blocks_total": "num_failed_blocks",
    "dropped_blocks_total": "num_dropped_blocks",
}
SERVING = ReplicaStatus(
    engine=0, state=ReplicaState.serving, num_unfinished=0, num_restarts=0, pid=None
)
VLLM = {"engine": "0", "model_name": "test-model"}


@dataclass(frozen=True)
class Figures:
    """One engine, as its metrics see it."""

    stats: EngineStats
    is_alive: bool = True
    seconds_since_step: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)
    status: ReplicaStatus = SERVING


@dataclass(frozen=True)
class Engines(Figures):
    """Several engines."""

    replicas: tuple[Figures, ...] = ()
    startup_seconds: dict[str, float] = field(default_factory=dict)
    determinism: dict[str, str] = field(default_factory=dict)


def key(name: str, **labels: str) -> str:
    return name + json.dumps(dict(sorted(labels.items())))


def samples(app) -> dict[str, float]:
    return {
        key(sample.name, **sample.labels): sample.value
        for family in text_string_to_metric_families(app.http.get("/metrics").text)
        for sample in family.samples
    }


def of_tiers(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if "kv_tier" in name}


class TestNames:
    def test_every_figure_has_one_metric(self, app):
        app.engine.stats = STATS
        expected = {
            key(f"ostinato_kv_tier_{name}", tier=tier): getattr(figures, figure)
            for name, figure in BY_TIER.items()
            for tier, figures in STATS.tiers.items()
        }
        expected |= {
            key("ostinato_kv_tier_loads_total"): 8,
            key("ostinato_kv_tier_refused_loads_total"): 9,
            key("ostinato_kv_tier_load_seconds_total"): 1.5,
        }
        assert of_tiers(samples(app)) == expected
        assert set(BY_TIER.values()) == set(TierStats.__struct_fields__)

    def test_they_are_absent_without_a_tier(self, app):
        text = app.http.get("/metrics").text
        assert "kv_tier" not in text
        assert "external_prefix_cache" not in text

    def test_each_of_several_engines(self, app, monkeypatch):
        monkeypatch.setattr(FakeClient, "replicas", property(lambda self: [self, self]))
        app.engine.stats = STATS
        found = of_tiers(samples(app))
        assert found[key("ostinato_kv_tier_used_places", tier="disk", engine="1")] == 40
        assert found[key("ostinato_kv_tier_loads_total", engine="0")] == 8
        assert len(found) == 2 * (2 * len(BY_TIER) + 3)

    def test_an_engine_that_has_not_reported_yet(self):
        engines = (Figures(EngineStats()), Figures(STATS), Figures(EngineStats()))
        families = list(EngineCollector(Engines(STATS, replicas=engines)).collect())
        assert len({family.name for family in families}) == len(families)
        (loads,) = (one for one in families if one.name == "ostinato_kv_tier_loads")
        assert [(one.labels, one.value) for one in loads.samples] == [({"engine": "1"}, 8)]
        (steps,) = (one for one in families if one.name == "ostinato_step_seconds")
        assert [one.labels["engine"] for one in steps.samples] == ["0", "1", "2"]


class TestVllmsNames:
    @pytest.mark.parametrize("block_size", [8, 16, 128])
    def test_tokens_outside_of_the_device(self, make_app, block_size):
        app = make_app(block_size=block_size)
        app.engine.stats = STATS
        found = samples(app)
        hits = 33 * block_size
        assert found[key("vllm:external_prefix_cache_hits_total", **VLLM)] == hits
        assert found[key("vllm:external_prefix_cache_queries_total", **VLLM)] == 1100 + hits

    @given(
        queries=st.integers(0, 10**6),
        share=st.fractions(0, 1),
        loaded=st.lists(st.integers(0, 10**4), max_size=2),
        block_size=st.sampled_from([8, 16, 32, 64, 128]),
    )
    def test_no_more_is_found_than_looked_up(self, queries, share, loaded, block_size):
        tiers = {
            name: TierStats(num_loaded_blocks=n) for name, n in zip("ab", loaded, strict=False)
        }
        stats = EngineStats(prefix_queries=queries, prefix_hits=int(queries * share), tiers=tiers)
        hits = loaded_tokens(stats, block_size)
        assert 0 <= hits <= looked_up_tokens(stats, block_size)
        # Both only grow: with a lookup that found one of two blocks, and with a loaded block.
        more = msgspec.structs.replace(
            stats,
            prefix_queries=stats.prefix_queries + 2 * block_size,
            prefix_hits=stats.prefix_hits + block_size,
        )
        assert loaded_tokens(more, block_size) == hits
        assert looked_up_tokens(more, block_size) > looked_up_tokens(stats, block_size)
