"""Reads `/metrics` and the flight recorder of a server of this engine while it is under load.

The results are values over time (batch size, queue, KV blocks), the steps in the recorder, and the
growth of counters: steps by kind, padding tokens, prefix hits, host time between steps. A server of
another engine has none of these, so its result lacks them.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Self

from ostinato.benchmarks.report.record import Metric

__all__ = ("ServerWatch", "counter_metrics")

_EVERY_S = 0.25
_TIMEOUT_S = 5.0
_MAX_STEPS = 20_000  # steps that are kept
_COLUMNS = {
    "running": "ostinato_requests_running",
    "waiting": "ostinato_requests_waiting",
    "kv_usage": "ostinato_kv_cache_usage_ratio",
    "output_tokens": "ostinato_generation_tokens_total",
    "prompt_tokens": "ostinato_prompt_tokens_total",
}


def _get(url: str, headers: Mapping[str, str]) -> str:
    request = urllib.request.Request(url, headers=dict(headers))
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
        return reply.read().decode(errors="replace")


def _scrape(url: str, headers: Mapping[str, str]) -> dict[str, float]:
    """{name and labels: value} of this engine's metrics; {} if there are none."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = _get(f"{url}/metrics", headers)
        return {
            sample.name
            + "".join(f'{{{k}="{v}"}}' for k, v in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("ostinato_") and "_bucket" not in sample.name
        }
    except (OSError, HTTPException, ValueError):
        return {}


def _read_steps(url: str, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """The finished steps in the flight recorder; [] without a recorder."""
    try:
        steps = json.loads(_get(f"{url}/debug/flight", headers))["steps"]
        return [step for step in steps if step["state"] == "done"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return []


class ServerWatch:
    """Watches a server during a measurement: `with ServerWatch(url) as watch:`.

    Args:
        url: URL of the server.
        headers: HTTP headers of the requests for metrics and steps.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = url
        self._headers = headers or {}
        self._steps: dict[int, dict[str, Any]] = {}
        self._stop = threading.Event()
        self.columns: dict[str, list[float]] = {"at_s": [], **{name: [] for name in _COLUMNS}}
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}

    def __enter__(self) -> Self:
        self.before = _scrape(self._url, self._headers)
        self._began_at, self._begin = time.time(), time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="server-watch", daemon=True)
        if self.before:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self.before:
            self._thread.join(2 * _TIMEOUT_S)
            self._take_steps()
            self.after = _scrape(self._url, self._headers)

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_S):
            found = _scrape(self._url, self._headers)
            if found:
                self.columns["at_s"].append(round(time.monotonic() - self._begin, 3))
                for name, key in _COLUMNS.items():
                    self.columns[name].append(found.get(key, 0.0))
            self._take_steps()

    def _take_steps(self) -> None:
        if len(self._steps) < _MAX_STEPS:
            self._steps |= {s["step"]: s for s in _read_steps(self._url, self._headers)}

    def columns_since(self, began_at: float) -> dict[str, list[float]]:
        """The columns from `began_at` (unix seconds) on; times count from there."""
        shift = began_at - self._began_at
        kept = [place for place, at in enumerate(self.columns["at_s"]) if at >= shift]
        columns = {name: [values[k] for k in kept] for name, values in self.columns.items()}
        columns["at_s"] = [round(at - shift, 3) for at in columns["at_s"]]
        return columns

    def steps_since(self, began_at: float) -> dict[str, list[float]]:
        """The steps that began after `began_at` (unix seconds), as columns.

        The recorder keeps the last `server.flight_recorder_steps` steps, so very short steps can be
        overwritten before they are read.
        """
        found = [s for _, s in sorted(self._steps.items()) if s["began_at"] >= began_at]
        return {
            "begin_s": [round(s["began_at"] - began_at, 6) for s in found],
            "seconds": [round(s["seconds"], 6) for s in found],
            "prompt_tokens": [s["num_tokens"] - s["num_decodes"] for s in found],
            "decode_tokens": [s["num_decodes"] for s in found],
            "seqs": [s["num_seqs"] for s in found],
        }

    def metrics(self) -> dict[str, Metric]:
        """Metrics from the growth of the server's counters during the measurement."""
        if not self.before or not self.after:
            return {}
        grown = {name: value - self.before.get(name, 0.0) for name, value in self.after.items()}
        metrics = counter_metrics(
            steps_by_kind={
                kind: grown.get(f'ostinato_steps_total{{kind="{kind}"}}', 0.0)
                for kind in ("captured", "compiled", "eager")
            },
            step_seconds=grown.get("ostinato_step_seconds_total", 0.0),
            model_seconds=grown.get("ostinato_model_seconds_total", 0.0),
            computed_tokens=grown.get("ostinato_prompt_tokens_total", 0.0)
            + grown.get("ostinato_generation_tokens_total", 0.0),
            padding_tokens=grown.get("ostinato_padding_tokens_total", 0.0),
            prefix_queries=grown.get("ostinato_prefix_cache_queries_total", 0.0),
            prefix_hits=grown.get("ostinato_prefix_cache_hits_total", 0.0),
            preemptions=grown.get("ostinato_preemptions_total", 0.0),
        )
        late = sum(v for name, v in grown.items() if name.startswith("ostinato_late_compiles"))
        metrics["late_compiles"] = Metric(late, "", "lower")
        if self.columns["kv_usage"]:
            metrics["kv_usage_peak"] = Metric(max(self.columns["kv_usage"]), "share")
        return metrics


def counter_metrics(
    *,
    steps_by_kind: dict[str, float],
    step_seconds: float,
    model_seconds: float,
    computed_tokens: float,
    padding_tokens: float,
    prefix_queries: float,
    prefix_hits: float,
    preemptions: float,
) -> dict[str, Metric]:
    """Metrics from the growth of an engine's counters: graph kinds, padding, host gap, hits."""
    steps = sum(steps_by_kind.values())
    metrics = {"steps": Metric(steps, ""), "preemptions": Metric(preemptions, "", "lower")}
    if steps:
        for kind, count in steps_by_kind.items():
            if count:
                metrics[f"steps_{kind}"] = Metric(count / steps, "share")
    if step_seconds > 0:
        gap = max(0.0, step_seconds - model_seconds) / step_seconds
        metrics["host_gap"] = Metric(gap, "share", "lower")
    if computed_tokens + padding_tokens > 0:
        share = padding_tokens / (computed_tokens + padding_tokens)
        metrics["padding_share"] = Metric(share, "share", "lower")
    if prefix_queries > 0:
        metrics["prefix_hit_rate"] = Metric(prefix_hits / prefix_queries, "share", "higher")
    return metrics
