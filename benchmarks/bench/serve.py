"""`run bench serve`: measures a server under load over HTTP: this engine's, or one at `load.url`.

    run bench serve load.rates=[1,2,4] slo.ttft_ms=300 slo.itl_ms=25
    run bench serve load.concurrency=[1,8,32] load.url=http://127.0.0.1:8001
    run bench serve workload=trace workload.path=trace.jsonl

Each rate and each concurrency is one point. Points send different token ids, so that the prompts of
one point are not in the prefix cache for another. Prompts from files (workload=tokens or sharegpt)
that are sent as text are the exception: they are the same for every point.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.load.job import LoadProgress
from ostinato.benchmarks.load.run import Target, find_target, make_job, measure_point
from ostinato.benchmarks.load.server_metrics import ServerWatch
from ostinato.benchmarks.load.server_process import Server
from ostinato.benchmarks.machine.probes import EnergyMeter, LoadMeter
from ostinato.benchmarks.report.record import Metric, Point, Record, conditions_of
from ostinato.benchmarks.workload.arrivals import LoadPoint, load_points
from ostinato.benchmarks.workload.model_facts import ModelFacts, model_facts
from ostinato.benchmarks.workload.select import fit_parts, one_part, read_parts
from ostinato.benchmarks.workload.workload import Part
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.bench_schema import PromptFormat, RequestEndpoint, WorkloadKind

__all__ = ("LoadRunner", "first_shift", "merge_runs", "serve", "workload_of")

_SHIFTS = 1 << 20


def serve(config: RunConfig, context: BenchContext) -> Record:
    """Measure every point of `load`.

    Raises:
        ConfigError: the workload or the load is not valid.
        StartupError: the server cannot start.
    """
    points = load_points(config.load)
    facts = model_facts(config)
    part, notes = workload_of(config, facts)
    with ExitStack() as stack:
        url, started = config.load.url, {}
        if not url:
            context.show("starting the server")
            server = stack.enter_context(Server(config))
            url = server.url
            phases = {name: round(s, 3) for name, s in server.startup_phases().items()}
            started = {"startup_s": round(server.ready_s, 3), "startup_phases_s": phases}
        target, found = find_target(url, config.load, is_ours=not config.load.url)
        notes += found
        shift = first_shift(config, stays_up=bool(config.load.url))
        runner = LoadRunner(config, context, facts, part, shift)
        results: list[Point] = []
        for point in points:
            runs = []
            for _ in range(config.bench.repeats):
                result, warnings = runner.measure(target, point)
                runs.append(result)
                notes += warnings
            results.append(merge_runs(runs))
    more = {"url": config.load.url, "served_model": target.model, "ids_shift": shift}
    return Record(
        kind=config.bench.kind.value,
        conditions=conditions_of(config, **more, **started),
        points=results,
        notes=notes,
    )


def workload_of(config: RunConfig, facts: ModelFacts) -> tuple[Part, list[str]]:
    """The requests to send, and notes on requests that were changed or left out to fit the model.

    Raises:
        ConfigError: the workload is missing, malformed or does not fit.
    """
    encode = None if facts.tokenizer is None else facts.tokenizer.encode
    parts = read_parts(config.workload, facts.vocab_size, encode)
    fitting, notes = fit_parts(
        [one_part(parts)],
        model=facts.name,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
    )
    return fitting[0], notes


def first_shift(config: RunConfig, *, stays_up: bool) -> int:
    """The first measurement's number. A measurement's token ids depend on its number.

    A server that keeps running may have cached the prompts of an earlier `run bench`. For such
    a server the number is random if the prompts are random. Otherwise it is 0.
    """
    return secrets.randbelow(_SHIFTS) if stays_up and _is_drawn(config) else 0


def _is_drawn(config: RunConfig) -> bool:
    return config.workload.kind not in (WorkloadKind.tokens, WorkloadKind.sharegpt)


@dataclass(slots=True)
class LoadRunner:
    """Measures points with one workload. Token ids differ between measurements if possible."""

    config: RunConfig
    context: BenchContext
    facts: ModelFacts
    part: Part
    count: int = 0  # number of the next measurement, on which its token ids depend

    def measure(self, target: Target, point: LoadPoint) -> tuple[Point, list[str]]:
        """Measure one point once; returns the point and warnings."""
        load, bench = self.config.load, self.config.bench
        as_ids = (
            load.prompt_format is PromptFormat.ids and load.endpoint is RequestEndpoint.completions
        )
        part = self.part
        if as_ids or _is_drawn(self.config):  # the ids of a text cannot be shifted
            part = part.rotated(self.count, self.facts.vocab_size)
        tokenizer = self.facts.tokenizer
        job = make_job(
            target,
            part,
            point,
            load,
            seed=self.config.workload.seed,
            decode=None if tokenizer is None else tokenizer.decode,
        )
        self.count += 1
        total = len(job.requests)

        def show(progress: LoadProgress) -> None:
            failed = f", {progress.failed} failed" if progress.failed else ""
            self.context.show(
                f"{point.label}: {progress.done} of {total} requests{failed}, "
                f"{progress.output_tokens} outputs"
            )

        self.context.show(f"{point.label}: {total} requests")
        meter, energy = LoadMeter(), EnergyMeter()
        energy.start()
        with ServerWatch(target.url, load.headers) as watch:
            result, warnings = measure_point(
                job,
                point,
                self.config.slo,
                bench.percentiles,
                detailed=bench.detailed,
                on_progress=show,
            )
        joules, tokens = energy.stop(), result.metrics["output_tokens"].value
        result.metrics |= watch.metrics()
        if joules is not None and tokens:
            result.metrics["energy_per_output_token"] = Metric(joules / tokens, "J", "lower")
        result.metrics["cpu_use"] = Metric(meter.stop(), "share")
        began_at = result.details["client"]["began_at"]
        if watch.columns["at_s"]:
            result.details["server"] = watch.columns_since(began_at)
        steps = watch.steps_since(began_at)
        if steps["seconds"]:
            result.details["steps"] = steps
        self.context.show("")
        return result, warnings


def merge_runs(runs: Sequence[Point]) -> Point:
    """Merge several measurements of a point: medians of the figures, details of the last."""
    if len(runs) == 1:
        return runs[0]
    last = runs[-1]
    merged: dict[str, Metric] = {}
    for name, metric in last.metrics.items():
        values = [run.metrics[name].value for run in runs if name in run.metrics]
        merged[name] = Metric.of(values, metric.unit, metric.better)
    return Point(label=last.label, parameters=last.parameters, metrics=merged, details=last.details)
