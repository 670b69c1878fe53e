"""Computes the metrics of `vllm bench serve`, and goodput, from request times.

TTFT is the time from the intended sending to the first output. E2E is the time from the intended
sending to the end of the answer. TPOT is the time from the first to the last output, divided by the
number of output tokens after the first. ITL is the gap between two pieces of output as they arrive;
one piece may hold several tokens. Client queue time is the actual minus the intended time of
sending.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ostinato.benchmarks.load.job import LoadReport, RequestTimes
from ostinato.benchmarks.report.record import Metric
from ostinato.benchmarks.report.statistics import percentile, summary
from ostinato.conf.sections.bench_schema import SloSection

__all__ = ("client_warnings", "failures", "itl_histogram", "load_metrics", "meets", "request_rows")

_BINS_PER_DECADE = 10
# If the client's timer is later than this, the figures depend on the client more than on the
# server.
_MAX_LAG_MS = 10.0
_MAX_CPU = 0.85


def load_metrics(
    report: LoadReport, slo: SloSection, percentiles: Sequence[float]
) -> dict[str, Metric]:
    """All metrics of one measurement. Latencies are of successful requests, in milliseconds."""
    done = [one for one in report.requests if one.status == "ok"]
    seconds = max(report.duration_s, 1e-9)
    prompt = sum(one.num_prompt_tokens for one in done)
    output = sum(one.num_output_tokens for one in done)
    metrics = {
        "completed": Metric(len(done), "requests", "higher"),
        "failed": Metric(len(report.requests) - len(done), "requests", "lower"),
        "duration": Metric(seconds, "s"),
        "input_tokens": Metric(prompt, "tokens"),
        "output_tokens": Metric(output, "tokens"),
        "request_throughput": Metric(len(done) / seconds, "requests/s", "higher"),
        "output_throughput": Metric(output / seconds, "tokens/s", "higher"),
        "total_throughput": Metric((prompt + output) / seconds, "tokens/s", "higher"),
        "peak_concurrency": Metric(_peak_concurrency(done), "requests"),
    }
    if seconds >= 1.0:  # a shorter run has no whole second
        metrics["peak_output_throughput"] = Metric(_peak_rate(done), "tokens/s", "higher")
    if _goals(slo):
        good = sum(meets(one, slo) for one in done)
        metrics["goodput"] = Metric(good / seconds, "requests/s", "higher")
        metrics["slo_attainment"] = Metric(good / max(1, len(report.requests)), "share", "higher")
    if prompt:
        cached = sum(one.num_cached_tokens for one in done)
        metrics["cached_prompt_share"] = Metric(cached / prompt, "share")
    latencies = {
        "ttft": [ttft for one in done if (ttft := _ttft(one)) is not None],
        "tpot": [tpot for one in done if (tpot := _tpot(one)) is not None],
        "itl": [gap for one in done for gap in _gaps(one)],
        "e2e": [one.end_s - one.intended_s for one in done],
        "client_queue": [one.sent_s - one.intended_s for one in done],
    }
    for name, values in latencies.items():
        for figure, value in summary(values, percentiles).items():
            better = "" if figure == "std" else "lower"
            metrics[f"{name}_{figure}"] = Metric(1000 * value, "ms", better)
    return metrics


def _ttft(one: RequestTimes) -> float | None:
    return one.chunk_s[0] - one.intended_s if one.chunk_s else None


def _tpot(one: RequestTimes) -> float | None:
    if one.num_output_tokens < 2 or not one.chunk_s:
        return None
    return (one.chunk_s[-1] - one.chunk_s[0]) / (one.num_output_tokens - 1)


def _gaps(one: RequestTimes) -> list[float]:
    return [b - a for a, b in zip(one.chunk_s, one.chunk_s[1:], strict=False)]


def _goals(slo: SloSection) -> bool:
    return any(goal is not None for goal in (slo.ttft_ms, slo.itl_ms, slo.tpot_ms, slo.e2e_ms))


def meets(one: RequestTimes, slo: SloSection) -> bool:
    """Whether a request was answered within every goal that is set."""
    if one.status != "ok":
        return False
    gaps = sorted(_gaps(one))
    pairs = (
        (slo.ttft_ms, _ttft(one)),
        (slo.itl_ms, percentile(gaps, 99) if gaps else None),
        (slo.tpot_ms, _tpot(one)),
        (slo.e2e_ms, one.end_s - one.intended_s),
    )
    return all(goal is None or value is None or 1000 * value <= goal for goal, value in pairs)


def _peak_rate(done: Iterable[RequestTimes]) -> float:
    """The most output tokens in any whole second of the run."""
    counts: defaultdict[int, float] = defaultdict(float)
    for one in done:
        share = one.num_output_tokens / max(1, len(one.chunk_s))
        for at in one.chunk_s:
            counts[int(at)] += share
    return max(counts.values(), default=0.0)


def _peak_concurrency(done: Iterable[RequestTimes]) -> int:
    changes = sorted(
        change for one in done for change in ((one.sent_s, 1), (one.end_s, -1))
    )  # an end at the same moment sorts first
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def failures(report: LoadReport) -> dict[str, dict[str, Any]]:
    """{status: number of requests with this status, and the error of the first}."""
    found: dict[str, dict[str, Any]] = {}
    for one in report.requests:
        if one.status != "ok":
            entry = found.setdefault(one.status, {"count": 0, "example": one.error})
            entry["count"] += 1
    return found


def client_warnings(report: LoadReport) -> list[str]:
    """Warnings if the client was so slow that the figures do not show the server alone."""
    warnings: list[str] = []
    gaps = sorted(gap for one in report.requests for gap in _gaps(one))
    limit = max(_MAX_LAG_MS, 200 * percentile(gaps, 50) if gaps else 0.0)
    lags = {
        "its own timer fired": report.loop_lag_ms["p99"],
        "requests were sent": report.send_lag_ms["p99"],
    }
    late = [f"{what} up to {lag:,.0f} ms late" for what, lag in lags.items() if lag > limit]
    if late:
        warnings.append(
            f"the client is a bottleneck: {' and '.join(late)} (99th percentile); lower the rate, "
            "or run it on a machine or cores of its own"
        )
    if report.cpu_share > _MAX_CPU:
        warnings.append(
            f"the client is a bottleneck: it used {report.cpu_share:.0%} of a core; lower the "
            "rate, or run several clients"
        )
    return warnings


def itl_histogram(report: LoadReport) -> dict[str, list[float]]:
    """Gaps between outputs: counts in ten bins a decade, with their lower edges in ms."""
    bins: Counter[int] = Counter()
    for one in report.requests:
        for gap in _gaps(one):
            bins[math.floor(_BINS_PER_DECADE * math.log10(max(gap * 1000, 1e-3)))] += 1
    if not bins:
        return {"edges_ms": [], "counts": []}
    places = range(min(bins), max(bins) + 1)
    edges = [round(10 ** (place / _BINS_PER_DECADE), 6) for place in places]
    return {"edges_ms": edges, "counts": [float(bins[place]) for place in places]}


def request_rows(report: LoadReport, slo: SloSection, *, with_chunks: bool) -> list[dict[str, Any]]:
    """Each request's times in seconds, as plots and detailed results need them."""
    rows: list[dict[str, Any]] = []
    for one in report.requests:
        row: dict[str, Any] = {
            "status": one.status,
            "intended_s": round(one.intended_s, 6),
            "sent_s": round(one.sent_s, 6),
            "first_s": round(one.chunk_s[0], 6) if one.chunk_s else None,
            "end_s": round(one.end_s, 6),
            "input_tokens": one.num_prompt_tokens,
            "cached_tokens": one.num_cached_tokens,
            "output_tokens": one.num_output_tokens,
            "meets_slo": meets(one, slo),
        }
        if with_chunks:
            row["chunk_s"] = [round(at, 6) for at in one.chunk_s]
        rows.append(row)
    return rows
