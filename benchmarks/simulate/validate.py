"""`run simulate --validate`: three workloads predicted, and run on a real server.

The server and the load client are those of `run bench serve`. What serving adds to the step-cost
table is calibrated on requests of its own (benchmarks/simulate/calibrate.py). Calibrations and
workloads take turns: a machine's speed drifts by a tenth and more within a minute, and a run is
predicted at the speed of the calibrations right before and after it. No figure of a workload goes
into its prediction. What each round measured says how much the real server differs from itself.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.arrivals import LoadPoint
from ostinato.benchmarks.context import BenchContext
from ostinato.benchmarks.load_job import LoadJob, LoadReport
from ostinato.benchmarks.load_metrics import client_warnings, load_metrics
from ostinato.benchmarks.load_run import Target, find_target, make_job, run_client
from ostinato.benchmarks.model_facts import ModelFacts, model_facts
from ostinato.benchmarks.probes import LoadMeter
from ostinato.benchmarks.record import (
    Metric,
    Point,
    Record,
    conditions_of,
    output_path,
    write_record,
)
from ostinato.benchmarks.server import Server
from ostinato.benchmarks.simulate.calibrate import Calibration, recording_server
from ostinato.benchmarks.simulate.engine import EngineSpec
from ostinato.benchmarks.simulate.fit import Fit, Recording, fit_serving
from ostinato.benchmarks.simulate.jobs import simulate_job
from ostinato.benchmarks.simulate.metrics import outcome_metrics
from ostinato.benchmarks.simulate.outcome import Outcome, percentile
from ostinato.benchmarks.simulate.serving import Serving
from ostinato.benchmarks.simulate.specs import measured_spec
from ostinato.benchmarks.workload import Part
from ostinato.benchmarks.workload_source import fit_parts, read_parts
from ostinato.conf.bench_schema import LoadSection, SloSection, WorkloadKind, WorkloadSection
from ostinato.conf.root import EngineConfig

__all__ = ("COMPARED", "compare", "validate", "validation_workloads")

COMPARED = ("output_throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
_PERCENTILES = (50.0, 99.0)
_MIN_REQUESTS = 16
_COST_BUDGET_S = 2.0
_NUM_ROUNDS = 4
_NUM_SEEDS = 8  # simulations of each round


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    """One workload of the validation."""

    name: str
    section: WorkloadSection
    load: LoadSection
    share: float | None  # of what the engine can take, as simulated; None = a closed loop
    concurrency: int | None = None


def validation_workloads() -> list[_Workload]:
    """Steady traffic; a closed loop; bursts of prompts with common prefixes."""
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
    """What was measured of one workload, a round each."""

    workload: _Workload
    point: LoadPoint
    jobs: list[LoadJob]
    reports: list[LoadReport]
    places: list[int]  # of the calibrations before each of them

    @property
    def num_first(self) -> int:
        """Requests of each round that TTFT leaves out: those with which a closed loop begins. They
        come in one moment, and the 99th percentile would be the longest of a few such moments.
        """
        return self.point.concurrency or 0


def validate(config: EngineConfig) -> int:
    """Predict, measure, compare; 1 when a figure misses by more than `simulate.tolerance`.

    Raises:
        StartupError: the engine can not start.
        EngineError: the load client or the server ended early.
    """
    section, context = config.simulate, BenchContext()
    path = output_path(section.output, "validate")
    facts = model_facts(config)
    others = LoadMeter()
    with tempfile.TemporaryDirectory() as bundles:
        # A table of this machine as it is now, not of an earlier start.
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
    context.show("")
    fit = fit_serving(spec.costs, calibrated)
    points = [_compared(one, spec, fit) for one in runs]
    missed = compare(points, section.tolerance)
    num_figures = len(points) * len(COMPARED)
    record = Record(
        kind="validate",
        conditions=conditions_of(config, other_cpu=round(others.stop(), 3)),
        points=points,
        notes=[
            f"{num_figures - len(missed)} of {num_figures} figures within {section.tolerance:.0%}"
            + (f"; not {', '.join(missed)}" if missed else ""),
            f"range: the real server against itself: figures of each of the {_NUM_ROUNDS} rounds "
            f"beside those of all together; {_num_within_range(points)} predictions lie in it",
            *(text for one in runs for report in one.reports for text in client_warnings(report)),
        ],
    )
    write_record(record, path)
    _print(record, section.tolerance)
    Console(width=100, highlight=False).print(
        f"every figure and its conditions: {path}", markup=False, soft_wrap=True
    )
    return 1 if missed else 0


def run_rounds(
    target: Target, facts: ModelFacts, spec: EngineSpec, seconds: float, context: BenchContext
) -> tuple[list[Recording], list[_Runs]]:
    """Calibrations and workloads in turns.

    Args:
        target: a server that records.
        facts: of its model.
        spec: of its engine.
        seconds: of traffic of each workload, all rounds together.
        context: shows progress.
    """
    calibration = Calibration(target, facts.vocab_size, spec)
    context.show("calibration")
    calibrated = [calibration.run() for _ in range(3)]
    # Rates are shares of what the server can take, so that no queue grows without end.
    served = dataclasses.replace(spec, serving=fit_serving(spec.costs, calibrated).serving)
    runs: list[_Runs] = []
    parts: list[Part] = []
    for workload in validation_workloads():
        part, point = _sized(workload, facts, served, seconds / _NUM_ROUNDS)
        parts.append(part)
        runs.append(_Runs(workload, point, [], [], []))
    for number in range(_NUM_ROUNDS):
        for turn in range(len(runs)):
            place = (number + turn) % len(runs)
            one = runs[place]
            context.show(f"round {number + 1} of {_NUM_ROUNDS}: {one.workload.name}")
            part = parts[place].rotated(number, facts.vocab_size)
            one.jobs.append(make_job(target, part, one.point, one.workload.load))
            one.places.append(len(calibrated) - 1)
            one.reports.append(run_client(one.jobs[-1]))
            calibrated.append(calibration.run())
    return calibrated, runs


def _sized(
    workload: _Workload, facts: ModelFacts, spec: EngineSpec, seconds: float
) -> tuple[Part, LoadPoint]:
    """As many requests as take so long, and how they are sent."""
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
    outcome = simulate_job(spec, job)
    return outcome.num_ended / max(outcome.last_s)


def _compared(runs: _Runs, spec: EngineSpec, fit: Fit) -> Point:
    """A point with `<figure>_predicted` beside each measured figure."""
    rounds = [_measured([one], runs.num_first) for one in runs.reports]
    together = _measured(runs.reports, runs.num_first)
    predicted = _predicted(runs, spec, fit)
    metrics = {"completed": together["completed"], "failed": together["failed"]}
    for figure in COMPARED:
        values = tuple(one[figure].value for one in rounds)
        metrics[figure] = dataclasses.replace(together[figure], runs=values)
        metrics[f"{figure}_predicted"] = predicted[figure]
    return Point(
        label=runs.workload.name,
        parameters={"rate": runs.point.rate, "concurrency": runs.point.concurrency},
        metrics=metrics,
        details={
            "serving": _described(fit.serving),
            "speeds": [[round(v, 3) for v in one] for one in fit.speeds],
            "calibrations_before": runs.places,
        },
    )


def _measured(reports: Sequence[LoadReport], num_first: int) -> dict[str, Metric]:
    """Figures of rounds as of one measurement: every request, the durations in succession."""
    metrics = load_metrics(_merged(reports, 0), SloSection(), _PERCENTILES)
    settled = load_metrics(_merged(reports, num_first), SloSection(), _PERCENTILES)
    return metrics | {name: one for name, one in settled.items() if name.startswith("ttft")}


def _merged(reports: Sequence[LoadReport], num_left_out: int) -> LoadReport:
    return LoadReport(
        requests=[request for one in reports for request in one.requests[num_left_out:]],
        began_at=reports[0].began_at,
        duration_s=sum(one.duration_s for one in reports),
        loop_lag_ms={},
        send_lag_ms={},
        cpu_share=0.0,
    )


def _predicted(runs: _Runs, spec: EngineSpec, fit: Fit) -> dict[str, Metric]:
    """Figures of all rounds, each simulated with several seeds."""
    total, seconds = Outcome(), 0.0
    for number, (job, place) in enumerate(zip(runs.jobs, runs.places, strict=True)):
        serving = fit.between(place)
        for seed in range(_NUM_SEEDS):
            seeded = dataclasses.replace(spec, serving=serving, seed=number * _NUM_SEEDS + seed)
            outcome = simulate_job(seeded, job)
            seconds += max(outcome.last_s, default=0.0)
            total.merge([outcome])
    metrics = outcome_metrics(total, spec, SloSection(), _PERCENTILES)
    tokens = sum(total.num_output)
    metrics["output_throughput"] = Metric(tokens / max(seconds, 1e-9), "tokens/s", "higher")
    ttft_s = total.ttft_s[np.asarray(total.keys) >= runs.num_first]
    for q in _PERCENTILES:
        value = 1000 * percentile(ttft_s, None, q / 100)
        metrics[f"ttft_p{q:g}"] = Metric(value, "ms", "lower")
    return metrics


def _described(serving: Serving) -> dict[str, Any]:
    """What was calibrated, by medians and tails."""

    def shares(values: Sequence[float], factor: float) -> list[float]:
        values = [*values, *values]  # at least two
        return [round(factor * one, 3) for one in quantiles(values, n=100)[9::40]]

    return {
        "decode_ratios": {str(one.size): shares(one.values, 1.0) for one in serving.decode},
        "prompt_ratios": {str(one.size): shares(one.values, 1.0) for one in serving.prompt},
        "pause_ms": shares(serving.pause_s, 1e3),
        "idle_request_ms": shares(serving.idle_request_s, 1e3),
        "busy_request_ms": {
            str(one.size): shares(one.values, 1e3) for one in serving.busy_request_s
        },
        "delivery_ms": shares([delay for one in serving.delivery_s for delay in one], 1e3),
        "end_ms": shares(serving.end_s, 1e3),
        "shares": [0.1, 0.5, 0.9],
    }


def _num_within_range(points: Sequence[Point]) -> int:
    """Predictions that some round was beyond, or at."""
    return sum(
        min(point.metrics[figure].runs)
        <= point.metrics[f"{figure}_predicted"].value
        <= max(point.metrics[figure].runs)
        for point in points
        for figure in COMPARED
    )


def compare(points: Sequence[Point], tolerance: float) -> list[str]:
    """Figures whose prediction misses by more than `tolerance`, in words."""
    missed: list[str] = []
    for point in points:
        for figure in COMPARED:
            error = _error(point, figure)
            if abs(error) > tolerance:
                missed.append(f"{point.label} {figure} ({error:+.0%})")
    return missed


def _error(point: Point, figure: str) -> float:
    measured, predicted = point.metrics[figure], point.metrics[f"{figure}_predicted"]
    return predicted.value / max(measured.value, 1e-9) - 1.0


def _print(record: Record, tolerance: float) -> None:
    console = Console(width=100, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("workload", "figure", "unit", "predicted", "measured", "range", "error", ""):
        left = heading in ("workload", "figure", "unit", "")
        table.add_column(heading, justify="left" if left else "right")
    for point in record.points:
        load = f"{point.parameters['concurrency']} at a time"
        if point.parameters["rate"]:
            load = f"{point.parameters['rate']:g} requests/s"
        labels = iter((point.label, load, f"{point.metrics['completed'].value:.0f} requests"))
        for figure in COMPARED:
            error = _error(point, figure)
            measured, predicted = point.metrics[figure], point.metrics[f"{figure}_predicted"]
            ends = [one / max(measured.value, 1e-9) - 1 for one in measured.runs]
            table.add_row(
                next(labels, ""),
                figure,
                measured.unit,
                f"{predicted.value:.1f}",
                f"{measured.value:.1f}",
                f"{min(ends):+.0%} .. {max(ends):+.0%}",
                f"{error:+.1%}",
                "" if abs(error) <= tolerance else "missed",
            )
    console.print(table)
    for note in record.notes:
        console.print(f"- {note}", markup=False)
