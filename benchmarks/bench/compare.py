"""`run bench compare`: measures engines in turns; prints ratios with confidence intervals.

    run bench compare 'bench.engines=["", "graphs.mode=eager"]' load.concurrency=[4]
    run bench compare 'bench.engines=["", "http://127.0.0.1:8001"]' bench.repeats=5

An entry of `bench.engines` is a list of overrides for a server of this engine, or the URL of any
OpenAI-compatible server. All servers run at the same time and take turns within each round, in a
changing order. A ratio compares measurements of one round, so a change of the machine's state
affects both. The 95 % intervals are bootstrap intervals over the rounds.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.bench.serve import LoadRunner, first_shift, merge_runs, workload_of
from ostinato.benchmarks.load.run import Target, find_target
from ostinato.benchmarks.load.server_process import Server
from ostinato.benchmarks.report.record import Metric, Point, Record, conditions_of
from ostinato.benchmarks.report.statistics import bootstrap_ratio
from ostinato.benchmarks.workload.arrivals import LoadPoint, load_points
from ostinato.benchmarks.workload.model_facts import model_facts
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig

__all__ = ("compare", "ratios")

COMPARED = (
    *("output_throughput", "request_throughput", "goodput"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "itl_p50", "itl_p99", "e2e_p50"),
)


@dataclass(frozen=True, slots=True)
class _Engine:
    name: str
    config: RunConfig | None  # None = the server runs already, at the URL `name`


def compare(config: RunConfig, context: BenchContext) -> Record:
    """Measure all engines at every point of `load`; the first engine is the reference.

    Raises:
        ConfigError: there are fewer than two engines, or an entry is not valid.
        StartupError: a server cannot start.
    """
    engines = [_engine(spec, context) for spec in config.bench.engines]
    if len(engines) < 2:
        raise ConfigError(
            "bench.engines needs two or more, each as overrides or a URL, for example "
            'bench.engines=["","graphs.mode=eager"]'
        )
    points = load_points(config.load)
    facts = model_facts(config)
    part, notes = workload_of(config, facts)
    with ExitStack() as stack:
        targets: list[Target] = []
        for engine in engines:
            url = engine.name
            if engine.config is not None:
                context.show(f"starting {engine.name}")
                url = stack.enter_context(Server(engine.config)).url
            target, found = find_target(url, config.load, is_ours=engine.config is not None)
            targets.append(target)
            notes += found
        stays_up = any(engine.config is None for engine in engines)
        shift = first_shift(config, stays_up=stays_up)
        runner = LoadRunner(config, context, facts, part, shift)
        results: list[Point] = []
        for point in points:
            runs: list[list[Point]] = [[] for _ in engines]
            for number in range(config.bench.warmup + config.bench.repeats):
                # The order rotates, so that an engine does not always run after the same other
                # engine.
                for turn in range(len(engines)):
                    place = (number + turn) % len(engines)
                    result, warnings = runner.measure(targets[place], point)
                    if number >= config.bench.warmup:
                        runs[place].append(result)
                        notes += [f"{engines[place].name}, {text}" for text in warnings]
            results += _points(engines, point, runs)
    names = [engine.name for engine in engines]
    if config.bench.repeats < 3:
        notes.append("with fewer than three rounds intervals mean little (bench.repeats)")
    return Record(
        kind=config.bench.kind.value,
        conditions=conditions_of(config, engines=names, reference=names[0], ids_shift=shift),
        points=results,
        notes=list(dict.fromkeys(notes)),
    )


def _engine(spec: str, context: BenchContext) -> _Engine:
    if spec.startswith(("http://", "https://")):
        return _Engine(spec, None)
    return _Engine(spec or "as configured", context.config_with(shlex.split(spec)))


def _points(
    engines: Sequence[_Engine], point: LoadPoint, runs: Sequence[Sequence[Point]]
) -> list[Point]:
    results: list[Point] = []
    for place, engine in enumerate(engines):
        merged = merge_runs(runs[place])
        metrics = dict(merged.metrics)
        details = dict(merged.details)
        if place:
            found = ratios(runs[place], runs[0])
            details["ratios"] = found
            for name, entry in found.items():
                better = metrics[name].better
                metrics[f"{name}_ratio"] = Metric(entry["ratio"], "x", better)
        results.append(
            replace(
                merged,
                label=f"{engine.name}, {point.label}",
                parameters={"engine": engine.name, **merged.parameters},
                metrics=metrics,
                details=details,
            )
        )
    return results


def ratios(ours: Sequence[Point], reference: Sequence[Point]) -> dict[str, dict[str, float]]:
    """{metric: ratio to the reference and its interval}, over rounds where both are positive."""
    found: dict[str, dict[str, float]] = {}
    for name in COMPARED:
        pairs = [
            (a.metrics[name].value, b.metrics[name].value)
            for a, b in zip(ours, reference, strict=True)
            if name in a.metrics and name in b.metrics
        ]
        pairs = [(a, b) for a, b in pairs if a > 0 and b > 0]
        if pairs:
            ratio, (low, high) = bootstrap_ratio([a for a, _ in pairs], [b for _, b in pairs])
            found[name] = {"ratio": ratio, "low": low, "high": high, "rounds": float(len(pairs))}
    return found
