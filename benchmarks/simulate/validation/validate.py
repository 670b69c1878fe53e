"""`run simulate --validate`: compares predictions for three workloads with a real server.

The server and the load client are those of `run bench serve`. The overheads of serving are fitted
to other requests (benchmarks/simulate/validation/calibration_traffic.py). Calibration and workloads
alternate, so a slow phase of the machine affects both. No measurement of a workload is used for its
prediction. A workload runs in several short rounds. The result is the median over the rounds. The
spread of the rounds shows the uncertainty of the median.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.load.job import LoadJob, LoadReport
from ostinato.benchmarks.load.run import Target, find_target, make_job, run_client
from ostinato.benchmarks.load.server_process import Server
from ostinato.benchmarks.load.serving_metrics import client_warnings, load_metrics
from ostinato.benchmarks.machine.probes import LoadMeter
from ostinato.benchmarks.report.record import (
    Metric,
    Point,
    Record,
    conditions_of,
    output_path,
    write_record,
)
from ostinato.benchmarks.report.statistics import percentile
from ostinato.benchmarks.simulate.jobs import simulate_job
from ostinato.benchmarks.simulate.predicted_metrics import predicted_metrics
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.specs import measured_spec, without_default_drafts
from ostinato.benchmarks.simulate.step_times.fit import Recording, fit_overheads
from ostinato.benchmarks.simulate.step_times.overheads import ServingOverheads
from ostinato.benchmarks.simulate.step_times.step_noise import StepRatios
from ostinato.benchmarks.simulate.validation.accuracy import (
    COMPARED,
    accuracy_notes,
    compare,
    print_accuracy,
)
from ostinato.benchmarks.simulate.validation.calibration_traffic import (
    Calibration,
    recording_server,
)
from ostinato.benchmarks.workload.arrivals import LoadPoint
from ostinato.benchmarks.workload.model_facts import ModelFacts, model_facts
from ostinato.benchmarks.workload.select import fit_parts, read_parts
from ostinato.benchmarks.workload.workload import Part
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.bench_schema import (
    LoadSection,
    SloSection,
    WorkloadKind,
    WorkloadSection,
)

__all__ = ("validate", "validation_workloads")

_PERCENTILES = (50.0, 99.0)
_MIN_REQUESTS = 16
_COST_BUDGET_S = 2.0
_NUM_ROUNDS = 8
_NUM_SEEDS = 4  # simulations of each round


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    """One workload of the validation."""

    name: str
    section: WorkloadSection
    load: LoadSection
    share: float | None  # load as a share of the simulated capacity; None = a closed loop
    concurrency: int | None = None


def validation_workloads() -> list[_Workload]:
    """The workloads: steady traffic, a closed loop, bursts of prompts with common prefixes."""
    return [
        _Workload(
            name="steady",
            section=WorkloadSection(
                kind=WorkloadKind.random, input_len=96, output_len=24, length_spread=0.5, seed=1
            ),
            load=LoadSection(),
            share=0.5,
        ),
        _Workload(
            name="closed",
            section=WorkloadSection(
                kind=WorkloadKind.random, input_len=64, output_len=48, length_spread=0.5, seed=2
            ),
            load=LoadSection(),
            share=None,
            concurrency=8,
        ),
        _Workload(
            name="bursts",
            section=WorkloadSection(
                kind=WorkloadKind.prefix,
                input_len=64,
                output_len=16,
                prefix_len=192,
                length_spread=0.5,
                seed=3,
            ),
            load=LoadSection(burstiness=0.5),
            share=0.6,
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Runs:
    """The measurements of one workload, one per round."""

    workload: _Workload
    point: LoadPoint
    jobs: list[LoadJob]
    reports: list[LoadReport]

    @property
    def num_first(self) -> int:
        """How many first requests of each round are left out of the TTFT figures.

        A closed loop begins with `concurrency` requests at the same time. Their queueing would
        determine the 99th percentile.
        """
        return self.point.concurrency or 0


def validate(config: RunConfig) -> int:
    """Predict, measure, compare; returns 1 if a figure misses by more than `simulate.tolerance`.

    Raises:
        ConfigError: the file of `simulate.output` cannot be written, or a workload does not fit the
            model's context.
        StartupError: the engine cannot start.
        EngineError: the load client or the server ended early.
        ValueError: the calibration had too few steps or requests.
    """
    config = without_default_drafts(config)
    section, context = config.simulate, BenchContext()
    path = output_path(section.output, "validate", "simulate.output")
    facts = model_facts(config)
    others = LoadMeter()
    with tempfile.TemporaryDirectory() as bundles:
        # The step-cost table is measured now, not taken from an earlier start.
        graphs = dataclasses.replace(
            config.graphs, bundle_dir=bundles, cost_table_budget_s=_COST_BUDGET_S
        )
        fresh = recording_server(dataclasses.replace(config, graphs=graphs))
        context.show("measuring step costs")
        spec = measured_spec(fresh)
        context.show("starting the server")
        with Server(fresh) as server:
            target, _ = find_target(server.url, config.load, is_ours=True)
            calibrated, runs = run_rounds(target, facts, spec, section.validate_s, context)
    context.show("predicting")
    served = dataclasses.replace(spec, overheads=fit_overheads(spec.costs, calibrated))
    points = [_compared(one, served) for one in runs]
    context.show("")
    record = Record(
        kind="validate",
        conditions=conditions_of(config, other_cpu=round(others.stop(), 3)),
        points=points,
        notes=[
            *accuracy_notes(points, section.tolerance),
            *(text for one in runs for report in one.reports for text in client_warnings(report)),
        ],
    )
    write_record(record, path)
    print_accuracy(record, section.tolerance)
    Console(width=100, highlight=False).print(
        f"every figure and its conditions: {path}", markup=False, soft_wrap=True
    )
    return 1 if compare(points, section.tolerance) else 0


def run_rounds(
    target: Target, facts: ModelFacts, spec: EngineSpec, seconds: float, context: BenchContext
) -> tuple[list[Recording], list[_Runs]]:
    """Run calibrations and workloads in turns.

    Args:
        target: a server with a flight recorder.
        facts: facts about its model.
        spec: its engine.
        seconds: seconds of traffic of each workload, all rounds together.
        context: shows progress.
    """
    calibration = Calibration(target, facts.vocab_size, spec)
    context.show("calibration")
    calibrated = [calibration.run() for _ in range(3)]
    # Rates are shares of the server's capacity, so that no queue grows without end.
    served = dataclasses.replace(spec, overheads=fit_overheads(spec.costs, calibrated))
    runs: list[_Runs] = []
    parts: list[Part] = []
    for workload in validation_workloads():
        part, point = _sized(workload, facts, served, seconds / _NUM_ROUNDS)
        parts.append(part)
        runs.append(_Runs(workload, point, [], []))
    for number in range(_NUM_ROUNDS):
        for turn in range(len(runs)):
            place = (number + turn) % len(runs)
            one = runs[place]
            context.show(f"round {number + 1} of {_NUM_ROUNDS}: {one.workload.name}")
            part = parts[place].rotated(number, facts.vocab_size)
            one.jobs.append(make_job(target, part, one.point, one.workload.load))
            one.reports.append(run_client(one.jobs[-1]))
            if turn % 2 == 0:
                calibrated.append(calibration.run())
    return calibrated, runs


def _sized(
    workload: _Workload, facts: ModelFacts, spec: EngineSpec, seconds: float
) -> tuple[Part, LoadPoint]:
    """Requests that take about `seconds`, and how they are sent."""
    few = dataclasses.replace(workload.section, num_requests=_MIN_REQUESTS)
    rate = _capacity(spec, _fitting(few, facts), workload.concurrency) * (workload.share or 1.0)
    count = max(_MIN_REQUESTS, round(rate * seconds))
    part = _fitting(dataclasses.replace(workload.section, num_requests=count), facts)
    if workload.concurrency is not None:
        return part, LoadPoint(concurrency=workload.concurrency)
    return part, LoadPoint(rate=round(rate, 2))


def _fitting(section: WorkloadSection, facts: ModelFacts) -> Part:
    parts, _ = fit_parts(
        read_parts(section, facts.vocab_size),
        model=facts.name,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
    )
    [part] = parts
    return part


def _capacity(spec: EngineSpec, part: Part, concurrency: int | None) -> float:
    """Requests per second of a closed loop."""
    point = LoadPoint(concurrency=concurrency or len(part.items))
    job = make_job(Target(url="", model=""), part, point, LoadSection())
    results = simulate_job(spec, job)
    return results.num_ended / max(results.last_s)


def _compared(runs: _Runs, spec: EngineSpec) -> Point:
    """A point with the median over the rounds of each figure, measured and `<figure>_predicted`."""
    rounds = [_measured(one, runs.num_first) for one in runs.reports]
    predicted = [
        _predicted(dataclasses.replace(spec, seed=number * _NUM_SEEDS + seed), job, runs.num_first)
        for number, job in enumerate(runs.jobs)
        for seed in range(_NUM_SEEDS)
    ]
    metrics: dict[str, Metric] = {}
    for name in ("completed", "failed"):
        metrics[name] = Metric(sum(one[name].value for one in rounds), "requests")
    for figure in COMPARED:
        for name, found in ((figure, rounds), (f"{figure}_predicted", predicted)):
            values = tuple(one[figure].value for one in found)
            metrics[name] = dataclasses.replace(found[0][figure], value=median(values), runs=values)
    assert spec.overheads is not None, "a validation's engine was calibrated"
    return Point(
        label=runs.workload.name,
        parameters={"rate": runs.point.rate, "concurrency": runs.point.concurrency},
        metrics=metrics,
        details={"serving": _described(spec.overheads)},
    )


def _measured(report: LoadReport, num_first: int) -> dict[str, Metric]:
    """Figures of one round."""
    metrics = load_metrics(report, SloSection(), _PERCENTILES)
    later = msgspec.structs.replace(report, requests=report.requests[num_first:])
    settled = load_metrics(later, SloSection(), _PERCENTILES)
    return metrics | {name: one for name, one in settled.items() if name.startswith("ttft")}


def _predicted(spec: EngineSpec, job: LoadJob, num_first: int) -> dict[str, Metric]:
    """Figures of one simulation of a round."""
    results = simulate_job(spec, job)
    metrics = predicted_metrics(results, spec, SloSection(), _PERCENTILES)
    ttft_s = results.ttft_s[np.asarray(results.keys) >= num_first]
    for q in _PERCENTILES:
        value = 1000 * percentile(ttft_s, q)
        metrics[f"ttft_p{q:g}"] = Metric(value, "ms", "lower")
    return metrics


def _described(overheads: ServingOverheads) -> dict[str, Any]:
    """The fitted overheads, as medians and tails."""

    def shares(values: Sequence[float], factor: float) -> list[float]:
        values = [*values, *values]  # at least two
        return [round(factor * one, 3) for one in quantiles(values, n=100)[9::40]]

    def ratios(found: StepRatios) -> dict[str, Any]:
        curves = (("prompt_tokens", found.tokens), ("decodes_and_one", found.seqs))
        return {
            **{name: {str(n): round(math.exp(v), 3) for n, v in curve} for name, curve in curves},
            "spread": shares(found.spread, 1.0),
        }

    return {
        "decode_ratios": ratios(overheads.decode),
        "prompt_ratios": ratios(overheads.prompt),
        "pause_ms": shares(overheads.pause_s, 1e3),
        "idle_request_ms": shares(overheads.idle_request_s, 1e3),
        "busy_request_ms": {
            str(one.size): shares(one.values, 1e3) for one in overheads.busy_request_s
        },
        "delivery_ms": shares([delay for one in overheads.delivery_s for delay in one], 1e3),
        "end_ms": shares(overheads.end_s, 1e3),
        "shares": [0.1, 0.5, 0.9],
    }
