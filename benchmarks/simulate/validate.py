"""`run simulate simulate.validate=true`: three workloads predicted, then run on a real server.

The server and the load client are those of `run bench serve`. What serving costs besides steps is
calibrated on requests of its own, before and after each workload, so that what the machine does
meanwhile is in both; no figure of a workload goes into its prediction.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.arrivals import LoadPoint
from ostinato.benchmarks.context import BenchContext
from ostinato.benchmarks.load_job import LoadJob
from ostinato.benchmarks.load_run import Target, find_target, make_job, measure_point
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
from ostinato.benchmarks.simulate.engine import EngineSpec, Overheads
from ostinato.benchmarks.simulate.fit import Calibration, Observations, fit_overheads
from ostinato.benchmarks.simulate.jobs import simulate_job
from ostinato.benchmarks.simulate.metrics import outcome_metrics
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    """One workload of the validation."""

    name: str
    section: WorkloadSection
    load: LoadSection
    share: float | None  # of what the engine can take, as simulated; None = a closed loop
    concurrency: int | None = None


def validation_workloads() -> list[_Workload]:
    """Steady traffic; a closed loop; bursts of long prompts with common prefixes."""
    return [
        _Workload(
            name="steady",
            section=WorkloadSection(
                kind=WorkloadKind.random, input_len=128, output_len=48, length_spread=0.5, seed=1
            ),
            load=LoadSection(),
            share=0.5,
        ),
        _Workload(
            name="closed",
            section=WorkloadSection(
                kind=WorkloadKind.random, input_len=64, output_len=64, length_spread=0.5, seed=2
            ),
            load=LoadSection(),
            share=None,
            concurrency=8,
        ),
        _Workload(
            name="bursts",
            section=WorkloadSection(
                kind=WorkloadKind.prefix,
                input_len=96,
                output_len=32,
                prefix_len=256,
                length_spread=0.5,
                seed=3,
            ),
            load=LoadSection(burstiness=0.5),
            share=0.6,
        ),
    ]


def validate(config: EngineConfig) -> int:
    """Predict, measure, compare; 1 when a figure misses by more than `simulate.tolerance`.

    Raises:
        StartupError: the engine can not start.
    """
    section, context = config.simulate, BenchContext()
    path = output_path(section.output, "validate")
    facts = model_facts(config)
    points: list[Point] = []
    others = LoadMeter()
    with tempfile.TemporaryDirectory() as bundles:
        # A table of this machine as it is now, not of an earlier start.
        graphs = dataclasses.replace(
            config.graphs, bundle_dir=bundles, cost_table_budget_s=_COST_BUDGET_S
        )
        fresh = dataclasses.replace(config, graphs=graphs)
        context.show("measuring step costs")
        spec = measured_spec(fresh)
        context.show("starting the server")
        with Server(fresh) as server:
            target, _ = find_target(server.url, config.load, is_ours=True)
            calibration = Calibration(
                target, facts.vocab_size, spec.max_model_len, spec.limits.max_num_seqs
            )
            before = calibration.run()
            # Rates are shares of what the server can take, so that no queue grows without end.
            served = dataclasses.replace(spec, overheads=fit_overheads(spec, before))
            for workload in validation_workloads():
                part = _part(workload, facts, served, section.validate_s)
                job, point = _job(workload, part, section.validate_s, target)
                context.show(f"{workload.name}: {len(job.requests)} requests")
                measured, _ = measure_point(job, point, SloSection(), _PERCENTILES)
                after = calibration.run()
                points.append(_compared(workload.name, job, spec, before + after, measured))
                before = after
    context.show("")
    record = Record(
        kind="validate",
        conditions=conditions_of(config, other_cpu=round(others.stop(), 3)),
        points=points,
        notes=[],
    )
    missed = compare(points, section.tolerance)
    record.notes.append(
        f"{len(points) * len(COMPARED) - len(missed)} of {len(points) * len(COMPARED)} figures "
        f"within {section.tolerance:.0%}" + (f"; not {', '.join(missed)}" if missed else "")
    )
    write_record(record, path)
    _print(record, section.tolerance)
    Console(width=100, highlight=False).print(
        f"every figure and its conditions: {path}", markup=False, soft_wrap=True
    )
    return 1 if missed else 0


def _part(workload: _Workload, facts: ModelFacts, spec: EngineSpec, seconds: float) -> Part:
    """As many requests as take so long."""
    few = dataclasses.replace(workload.section, num_requests=_MIN_REQUESTS)
    [part] = _fitting(few, facts)
    rate = _capacity(spec, part, workload.concurrency) * (workload.share or 1.0)
    count = max(_MIN_REQUESTS, round(rate * seconds))
    [part] = _fitting(dataclasses.replace(workload.section, num_requests=count), facts)
    return part


def _fitting(section: WorkloadSection, facts: ModelFacts) -> list[Part]:
    parts, _ = fit_parts(
        read_parts(section, facts.vocab_size),
        model=facts.name,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
    )
    return parts


def _capacity(spec: EngineSpec, part: Part, concurrency: int | None) -> float:
    """Requests per second of a closed loop."""
    point = LoadPoint(concurrency=concurrency or len(part.items))
    job = make_job(Target(url="", model=""), part, point, LoadSection())
    outcome = simulate_job(spec, job)
    return outcome.num_ended / max(outcome.last_s)


def _job(
    workload: _Workload, part: Part, seconds: float, target: Target
) -> tuple[LoadJob, LoadPoint]:
    if workload.concurrency is not None:
        point = LoadPoint(concurrency=workload.concurrency)
    else:
        point = LoadPoint(rate=round(len(part.items) / seconds, 2))
    return make_job(target, part, point, workload.load), point


def _compared(
    name: str,
    job: LoadJob,
    spec: EngineSpec,
    observations: Observations,
    measured: Point,
) -> Point:
    """A point with `<figure>_predicted` beside each measured figure."""
    overheads = fit_overheads(spec, observations)
    served = dataclasses.replace(spec, overheads=overheads)
    predicted = outcome_metrics(simulate_job(served, job), served, SloSection(), _PERCENTILES)
    metrics: dict[str, Metric] = {}
    for figure in COMPARED:
        metrics[figure] = measured.metrics[figure]
        metrics[f"{figure}_predicted"] = predicted[figure]
    details = {"overheads": _rounded(overheads)}
    return Point(label=name, parameters=measured.parameters, metrics=metrics, details=details)


def _rounded(overheads: Overheads) -> dict[str, Any]:
    values = dataclasses.asdict(overheads)
    jitter = values.pop("jitter_s")
    rounded = {name: round(value, 6) for name, value in values.items()}
    return rounded | {"jitter_ms": [round(1000 * jitter[i], 2) for i in (5, 50, 90, 95, 99)]}


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
    for heading in ("workload", "figure", "unit", "predicted", "measured", "error", ""):
        left = heading in ("workload", "figure", "unit", "")
        table.add_column(heading, justify="left" if left else "right")
    for point in record.points:
        label = f"{point.label}, {point.parameters['rate'] or ''}"
        if point.parameters["concurrency"]:
            label = f"{point.label}, {point.parameters['concurrency']} at a time"
        elif point.parameters["rate"]:
            label += " requests/s"
        for figure in COMPARED:
            error = _error(point, figure)
            measured, predicted = point.metrics[figure], point.metrics[f"{figure}_predicted"]
            table.add_row(
                label,
                figure,
                measured.unit,
                f"{predicted.value:.1f}",
                f"{measured.value:.1f}",
                f"{error:+.1%}",
                "" if abs(error) <= tolerance else "missed",
            )
            label = ""
    console.print(table)
    for note in record.notes:
        console.print(f"- {note}", markup=False)
