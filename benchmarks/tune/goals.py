"""The goals of `run tune`: limits on latency percentiles, and the distance of metrics from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Self

from ostinato.benchmarks.report.record import Metric
from ostinato.conf.sections.bench_schema import SloSection
from ostinato.conf.sections.tuning_schema import TuneObjective

__all__ = ("Goals", "ServingMetrics")

_NAMES = ("ttft", "itl", "tpot", "e2e")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingMetrics:
    """Metrics of a configuration, measured or predicted; latencies in ms at the percentile."""

    ttft_ms: float
    itl_ms: float
    tpot_ms: float
    e2e_ms: float
    throughput: float  # output tokens per second
    completed_share: float = 1.0  # completed requests / sent requests

    @classmethod
    def of(cls, metrics: Mapping[str, Metric], percentile: float) -> Self:
        """The metrics of a result. A latency without measurements is 0."""

        def value(name: str) -> float:
            return metrics[name].value if name in metrics else 0.0

        done, failed = value("completed"), value("failed")
        latencies = {f"{name}_ms": value(f"{name}_p{percentile:g}") for name in _NAMES}
        return cls(
            **latencies,
            throughput=value("output_throughput"),
            completed_share=done / (done + failed) if done + failed else 0.0,
        )

    def scaled(self, factors: Mapping[str, float]) -> ServingMetrics:
        """A copy with each figure multiplied by its factor, if it has one."""
        changes = {name: getattr(self, name) * factor for name, factor in factors.items()}
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Limits in ms (None = no limit), and the objective among configurations that meet them."""

    ttft_ms: float | None
    itl_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    percentile: float
    objective: TuneObjective

    @classmethod
    def of(cls, slo: SloSection, percentile: float, objective: TuneObjective) -> Self:
        limits = {f"{name}_ms": getattr(slo, f"{name}_ms") for name in _NAMES}
        return cls(**limits, percentile=percentile, objective=objective)

    @property
    def limits(self) -> dict[str, float]:
        """{name of a latency: its limit}, for the limits that are set."""
        pairs = ((name, getattr(self, f"{name}_ms")) for name in _NAMES)
        return {name: limit for name, limit in pairs if limit is not None}

    def ratios(self, metrics: ServingMetrics) -> dict[str, float]:
        """{name: figure / limit}; a ratio of at most 1 meets the goal."""
        found = {
            name: getattr(metrics, f"{name}_ms") / limit for name, limit in self.limits.items()
        }
        if metrics.completed_share < 1.0:
            found["completed"] = math.inf  # if a request failed, the goals are not met
        return found

    def violation(self, metrics: ServingMetrics) -> float:
        """The worst ratio minus 1; at most 0 if all goals are met."""
        return max(self.ratios(metrics).values(), default=0.0) - 1.0

    def rank(self, metrics: ServingMetrics) -> tuple[float, float]:
        """A sort key. Configurations that meet the goals come first, the best by the objective.

        The others follow, the nearest to the goals first.
        """
        violation = self.violation(metrics)
        if violation > 0.0:
            return (1.0 + violation, 0.0)
        # Throughputs within two percent count as equal. Among equals the margin to the goals
        # decides.
        worst = violation if self.limits else metrics.ttft_ms + metrics.e2e_ms
        if self.objective is TuneObjective.latency:
            return (0.0, worst)
        return (-round(math.log(max(metrics.throughput, 1e-9)) / 0.02), worst)

    def describe(self) -> str:
        """The goals as text, such as "TTFT p95 <= 300 ms, ITL p95 <= 25 ms"."""
        return ", ".join(
            f"{name.upper()} p{self.percentile:g} <= {limit:g} ms"
            for name, limit in self.limits.items()
        )
