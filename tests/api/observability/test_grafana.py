"""docs/grafana.json queries existing metrics. No panel is empty, and no panel covers another."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ostinato.runtime.types.engine_info import EngineStats
from ostinato.runtime.types.tier_stats import TierStats

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "docs" / "grafana.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# The collector omits these without a GPU. A test below finds their names in its source.
GPU = {
    "ostinato_gpu_utilization_ratio",
    "ostinato_gpu_memory_used_bytes",
    "ostinato_gpu_memory_total_bytes",
}


def sample_names(app) -> set[str]:
    app.engine.stats = EngineStats(tiers={"disk": TierStats()})  # without a tier, some are absent
    app.chat()
    app.chat(temperature=9)  # a refused request, so that the counter of refusals has a sample
    families = text_string_to_metric_families(app.http.get("/metrics").text)
    return {sample.name for family in families for sample in family.samples}


def test_every_metric_exists(app) -> None:
    known = sample_names(app) | GPU
    text = json.dumps(DASHBOARD)
    asked = set(re.findall(r"(?:ostinato|vllm|process)[:_][a-z0-9_]+", text))
    asked -= {"ostinato"}
    assert len(asked) > 30
    assert asked - known == set()
    source = (Path(__file__).parents[3] / "api" / "observability" / "engine_metrics.py").read_text()
    for name in GPU:
        assert f'"{name.removeprefix("ostinato_gpu_")}"' in source


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        query = target["expr"]
        assert '{instance=~"$instance"' in query
        assert query.count("(") == query.count(")")
        # A panel shows a counter as a rate, or as a sum that should stay 0.
        for name in re.findall(r"ostinato_[a-z_]+_total\b", query):
            assert f"rate({name}" in query or name in (
                "ostinato_late_compiles_total",
                "ostinato_engine_restarts_total",
            )


def test_panels_do_not_lie_on_each_other() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
