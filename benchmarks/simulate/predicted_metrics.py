"""Metrics of a simulation, under the names of benchmarks/load/serving_metrics.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.benchmarks.report.record import Metric
from ostinato.benchmarks.report.statistics import percentile
from ostinato.benchmarks.simulate.results import SimulationResults
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.conf.sections.bench_schema import SloSection

__all__ = ("predicted_metrics",)


def predicted_metrics(
    results: SimulationResults, spec: EngineSpec, slo: SloSection, percentiles: Sequence[float]
) -> dict[str, Metric]:
    """All metrics; latencies in milliseconds.

    Args:
        results: the results of a whole simulation.
        spec: the simulated engine.
        slo: the goals; the ITL goal is compared with a request's longest gap.
        percentiles: percentiles in (0, 100].
    """
    last = np.asarray(results.last_s)
    seconds = max(float(last.max()) if len(last) else 0.0, 1e-9)
    prompt, output = sum(results.num_prompt), sum(results.num_output)
    metrics = {
        "completed": Metric(results.num_ended, "requests", "higher"),
        "failed": Metric(results.num_refused, "requests", "lower"),
        "duration": Metric(seconds, "s"),
        "input_tokens": Metric(prompt, "tokens"),
        "output_tokens": Metric(output, "tokens"),
        "request_throughput": Metric(results.num_ended / seconds, "requests/s", "higher"),
        "output_throughput": Metric(output / seconds, "tokens/s", "higher"),
        "total_throughput": Metric((prompt + output) / seconds, "tokens/s", "higher"),
    }
    good = _good(results, slo)
    if good is not None:
        sent = max(1, results.num_ended + results.num_refused)
        metrics["goodput"] = Metric(good / seconds, "requests/s", "higher")
        metrics["slo_attainment"] = Metric(good / sent, "share", "higher")
    if prompt:
        metrics["cached_prompt_share"] = Metric(sum(results.num_cached) / prompt, "share")
    latencies = {
        "ttft": (results.ttft_s, None),
        "tpot": (results.tpot_s, None),
        "itl": results.gaps,
        "e2e": (results.e2e_s, None),
    }
    for name, (values, weights) in latencies.items():
        if len(values):
            mean = np.average(values, weights=weights)
            metrics[f"{name}_mean"] = Metric(1000 * float(mean), "ms", "lower")
            for q in percentiles:
                value = 1000 * percentile(values, q, weights)
                metrics[f"{name}_p{q:g}"] = Metric(value, "ms", "lower")
    return metrics | _engine_metrics(results, spec)


def _engine_metrics(results: SimulationResults, spec: EngineSpec) -> dict[str, Metric]:
    counters = results.counters
    metrics = {
        "steps": Metric(results.num_steps),
        "preemptions": Metric(counters.get("preemptions", 0), "", "lower"),
        "batch_mean": Metric(results.mean_seqs, "sequences"),
        "kv_usage_mean": Metric(results.mean_blocks / (spec.num_blocks - 1), "share"),
        "kv_usage_peak": Metric(results.most_blocks / (spec.num_blocks - 1), "share"),
        "busy": Metric(results.busy_s, "s"),  # over all replicas
    }
    if queries := counters.get("prefix_queries", 0):
        rate = counters.get("prefix_hits", 0) / queries
        metrics["prefix_hit_rate"] = Metric(rate, "share", "higher")
    return metrics


def _good(results: SimulationResults, slo: SloSection) -> int | None:
    """Requests within every goal that is set; None without goals."""
    counts = np.maximum(1, np.asarray(results.num_output) - 1)
    tpot = (np.asarray(results.last_s) - np.asarray(results.first_s)) / counts
    pairs = (
        (slo.ttft_ms, results.ttft_s),
        (slo.itl_ms, np.asarray(results.longest_gap_s)),
        (slo.tpot_ms, tpot),
        (slo.e2e_ms, results.e2e_s),
    )
    goals = [1000 * values <= goal for goal, values in pairs if goal is not None]
    return int(np.logical_and.reduce(goals).sum()) if goals else None
