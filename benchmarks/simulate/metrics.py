"""Figures of a simulation under the names of a measurement (benchmarks/load/metrics.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.benchmarks.report.record import Metric
from ostinato.benchmarks.simulate.engine import EngineSpec
from ostinato.benchmarks.simulate.results import Outcome, percentile
from ostinato.conf.bench_schema import SloSection

__all__ = ("outcome_metrics",)


def outcome_metrics(
    outcome: Outcome, spec: EngineSpec, slo: SloSection, percentiles: Sequence[float]
) -> dict[str, Metric]:
    """Every figure; latencies in milliseconds.

    Args:
        outcome: of a whole simulation.
        spec: its engines.
        slo: goals; the one for gaps is taken against a request's longest.
        percentiles: in (0, 100].
    """
    last = np.asarray(outcome.last_s)
    seconds = max(float(last.max()) if len(last) else 0.0, 1e-9)
    prompt, output = sum(outcome.num_prompt), sum(outcome.num_output)
    metrics = {
        "completed": Metric(outcome.num_ended, "requests", "higher"),
        "failed": Metric(outcome.num_refused, "requests", "lower"),
        "duration": Metric(seconds, "s"),
        "input_tokens": Metric(prompt, "tokens"),
        "output_tokens": Metric(output, "tokens"),
        "request_throughput": Metric(outcome.num_ended / seconds, "requests/s", "higher"),
        "output_throughput": Metric(output / seconds, "tokens/s", "higher"),
        "total_throughput": Metric((prompt + output) / seconds, "tokens/s", "higher"),
    }
    good = _good(outcome, slo)
    if good is not None:
        sent = max(1, outcome.num_ended + outcome.num_refused)
        metrics["goodput"] = Metric(good / seconds, "requests/s", "higher")
        metrics["slo_attainment"] = Metric(good / sent, "share", "higher")
    if prompt:
        metrics["cached_prompt_share"] = Metric(sum(outcome.num_cached) / prompt, "share")
    latencies = {
        "ttft": (outcome.ttft_s, None),
        "tpot": (outcome.tpot_s, None),
        "itl": outcome.gaps,
        "e2e": (outcome.e2e_s, None),
    }
    for name, (values, weights) in latencies.items():
        if len(values):
            mean = np.average(values, weights=weights)
            metrics[f"{name}_mean"] = Metric(1000 * float(mean), "ms", "lower")
            for q in percentiles:
                value = 1000 * percentile(values, weights, q / 100)
                metrics[f"{name}_p{q:g}"] = Metric(value, "ms", "lower")
    return metrics | _engine_metrics(outcome, spec)


def _engine_metrics(outcome: Outcome, spec: EngineSpec) -> dict[str, Metric]:
    counters = outcome.counters
    metrics = {
        "steps": Metric(outcome.num_steps),
        "preemptions": Metric(counters.get("preemptions", 0), "", "lower"),
        "batch_mean": Metric(outcome.mean_seqs, "sequences"),
        "kv_usage_mean": Metric(outcome.mean_blocks / (spec.num_blocks - 1), "share"),
        "kv_usage_peak": Metric(outcome.most_blocks / (spec.num_blocks - 1), "share"),
        "busy": Metric(outcome.busy_s, "s"),  # over all replicas
    }
    if queries := counters.get("prefix_queries", 0):
        rate = counters.get("prefix_hits", 0) / queries
        metrics["prefix_hit_rate"] = Metric(rate, "share", "higher")
    return metrics


def _good(outcome: Outcome, slo: SloSection) -> int | None:
    """Requests within every goal that is set; None without goals."""
    counts = np.maximum(1, np.asarray(outcome.num_output) - 1)
    tpot = (np.asarray(outcome.last_s) - np.asarray(outcome.first_s)) / counts
    pairs = (
        (slo.ttft_ms, outcome.ttft_s),
        (slo.itl_ms, np.asarray(outcome.longest_gap_s)),
        (slo.tpot_ms, tpot),
        (slo.e2e_ms, outcome.e2e_s),
    )
    goals = [1000 * values <= goal for goal, values in pairs if goal is not None]
    return int(np.logical_and.reduce(goals).sum()) if goals else None
