"""Explains why a goal cannot be met: because of the machine, the traffic or another goal."""

from __future__ import annotations

from ostinato.benchmarks.tune.forecast import Forecast
from ostinato.benchmarks.tune.goals import Goals, ServingMetrics
from ostinato.benchmarks.tune.search import Candidate
from ostinato.conf.root import RunConfig

__all__ = ("highest_load", "impossible_goals", "why_missed")

# A goal counts as impossible if the prediction misses it by more than this factor.
_MARGIN = 1.2
_LOADS = (0.02, 8.0)
_BISECTIONS = 7


def impossible_goals(config: RunConfig, forecast: Forecast, goals: Goals) -> list[str]:
    """Messages about goals that are missed even with one request at a time.

    No schedule can meet such a goal, because even a request that waits for no other misses it.
    """
    overheads = forecast.overheads
    # Overheads are replaced by their medians, so that disturbances by other programs do not count.
    forecast.overheads = overheads and overheads.typical()
    alone = forecast.predict(config, job=forecast.one_at_a_time())
    forecast.overheads = overheads
    if alone is None:
        return []
    texts = {
        "ttft": "the prompt alone takes that long to compute",
        "itl": "one step of one sequence takes that long",
        "tpot": "steps of one sequence take that long",
        "e2e": "a request that does not wait for others takes that long",
    }
    return [
        f"slo.{name}_ms={limit:g} cannot be met: with one request at a time p"
        f"{goals.percentile:g} is {_ms(getattr(alone, f'{name}_ms'))}, {texts[name]}; the limit "
        f"is this machine's speed with this model"
        for name, limit in goals.limits.items()
        if getattr(alone, f"{name}_ms") > _MARGIN * limit
    ]


def why_missed(candidates: list[Candidate], goals: Goals, factors: dict[str, float]) -> list[str]:
    """Messages about how meeting each goal affects the others, by corrected predictions."""
    if not candidates:
        return ["no time was left for a search; raise tune.budget_s"]
    corrected = [one.predicted.scaled(factors) for one in candidates]
    lines: list[str] = []
    for name, limit in goals.limits.items():
        key = f"{name}_ms"
        least = min(corrected, key=lambda one: getattr(one, key))
        if getattr(least, key) > limit:
            lines.append(
                f"slo.{key}={limit:g}: no configuration is predicted to give less than "
                f"{_ms(getattr(least, key))} under this traffic"
            )
            continue
        meeting = [one for one in corrected if getattr(one, key) <= limit]
        nearest = min(meeting, key=goals.violation)
        others = ", ".join(
            f"{other.upper()} {_ms(getattr(nearest, f'{other}_ms'))} (goal {its:g})"
            for other, its in goals.limits.items()
            if other != name
        )
        if others:
            lines.append(f"slo.{key}={limit:g} can be met, but then at best with {others}")
    return lines


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def highest_load(
    config: RunConfig, forecast: Forecast, goals: Goals, factors: dict[str, float]
) -> float | None:
    """The highest multiple of the load that is predicted to meet the goals; None = no load does."""

    def holds(load: float) -> bool:
        metrics: ServingMetrics | None = forecast.predict(config, job=forecast.at_load(load))
        return metrics is not None and goals.violation(metrics.scaled(factors)) <= 0.0

    low, high = _LOADS
    if not holds(low):
        return None
    if holds(high):
        return high
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
