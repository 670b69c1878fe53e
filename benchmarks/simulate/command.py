"""`run simulate`: predicts the metrics of servers under load, without a device.

    run simulate load.rates=[2,4,8]
    run simulate model=llama-8b simulate.device=h100 simulate.replicas=8 load.rates=[40] \\
        simulate.router=prefix_aware workload=prefix
    run simulate workload=trace workload.path=trace.jsonl simulate.rounds=24
    run simulate --validate

Each rate and each concurrency of `load` is one point, as for `run bench serve`, and the result has
the same form. Days of traffic take minutes.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ostinato.benchmarks.bench.serve import workload_of
from ostinato.benchmarks.load.job import LoadJob
from ostinato.benchmarks.load.run import Target, make_job
from ostinato.benchmarks.report.record import (
    Metric,
    Point,
    Record,
    conditions_of,
    output_path,
    write_record,
)
from ostinato.benchmarks.report.tables import print_record
from ostinato.benchmarks.simulate.fleet import simulate_open
from ostinato.benchmarks.simulate.jobs import JobTraffic, simulate_job
from ostinato.benchmarks.simulate.predicted_metrics import predicted_metrics
from ostinato.benchmarks.simulate.results import SimulationResults
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.specs import engine_spec, save_costs, without_weights
from ostinato.benchmarks.workload.arrivals import LoadPoint, load_points
from ostinato.benchmarks.workload.model_facts import ModelFacts, model_facts
from ostinato.benchmarks.workload.workload import Part
from ostinato.conf.environment import expand_user, require_writable
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.bench_schema import LoadSection, PromptFormat, RequestEndpoint
from ostinato.conf.sections.tuning_schema import SimulateSection

__all__ = ("simulate", "simulated_job", "simulated_record")


def simulate(config: RunConfig) -> int:
    """Predict every point of `load`; returns the exit code.

    With `simulate.validate`, predict and measure instead; the exit code is then that of `validate`.

    Raises:
        ConfigError: the workload, the load or the fleet is not valid.
        StartupError: an engine with this configuration could not start.
        EngineError, ValueError: as `validate`, with `simulate.validate`.
    """
    section = config.simulate
    if config.parallel.data > 1:
        raise ConfigError(
            f"parallel.data={config.parallel.data} is for servers; a fleet is simulated with "
            f"simulate.replicas={config.parallel.data} and simulate.router"
        )
    if section.validate:
        from ostinato.benchmarks.simulate.validation.validate import validate

        return validate(config)
    path = output_path(section.output, "simulate", "simulate.output")
    if section.save_costs:
        require_writable(expand_user(section.save_costs), "simulate.save_costs")
    record = simulated_record(config)
    write_record(record, path)
    print_record(record, path)
    return 0


def simulated_record(config: RunConfig) -> Record:
    """The prediction of every point of `load`.

    Raises:
        ConfigError, StartupError: as `simulate`.
    """
    section = config.simulate
    points = load_points(config.load)
    facts = model_facts(
        config if not (section.costs or section.device) else without_weights(config)
    )
    part, notes = workload_of(config, facts)
    spec = engine_spec(config)
    if section.save_costs:
        save_costs(spec.costs, section.save_costs)
    results = [_point(config, facts, part, spec, point) for point in points]
    return Record(
        kind="simulate",
        conditions=conditions_of(config, engine=describe(spec)),
        points=results,
        notes=[*notes, *_notes(config)],
    )


def simulated_job(load: LoadSection, part: Part, point: LoadPoint, seed: int) -> LoadJob:
    """The job that a load client would run at this point, with prompts of token ids."""
    load = dataclasses.replace(
        load, endpoint=RequestEndpoint.completions, prompt_format=PromptFormat.ids
    )
    return make_job(Target(url="", model=""), part, point, load, seed=seed)


def describe(spec: EngineSpec) -> dict[str, object]:
    """Facts about an engine, for a record."""
    return {
        "max_num_seqs": spec.limits.max_num_seqs,
        "max_num_batched_tokens": spec.limits.max_num_batched_tokens,
        "num_blocks": spec.num_blocks,
        "block_size": spec.block_size,
        "max_model_len": spec.max_model_len,
        "decode_ms": {
            str(size): round(1000 * spec.costs.decode_seconds(size, 0), 3)
            for size in spec.costs.seqs
        },
    }


def _notes(config: RunConfig) -> list[str]:
    section, load = config.simulate, config.load
    source = f"from the data sheet of {section.device}" if section.device else "measured"
    if section.costs:
        source = f"of {section.costs}"
    notes = [f"simulated: step costs {source}; other overheads of serving are not included"]
    if load.endpoint is RequestEndpoint.chat or load.prompt_format is PromptFormat.text:
        notes.append("prompts are the workload's token ids, without a chat template")
    return notes


def _point(
    config: RunConfig, facts: ModelFacts, part: Part, spec: EngineSpec, point: LoadPoint
) -> Point:
    section = config.simulate
    job = simulated_job(config.load, part, point, config.workload.seed)
    total = len(job.requests) * section.rounds
    begin = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(point.label, total=total)

        def show(number: int) -> None:
            progress.update(task, completed=number)

        results = _run(section, job, spec, facts.vocab_size, show)
    took = time.perf_counter() - begin
    metrics = predicted_metrics(results, spec, config.slo, config.bench.percentiles)
    metrics["busy_share"] = Metric(
        metrics["busy"].value / max(metrics["duration"].value * section.replicas, 1e-9), "share"
    )
    metrics["simulation_time"] = Metric(took, "s")
    metrics["speed"] = Metric(metrics["duration"].value / max(took, 1e-9), "x real time", "higher")
    return Point(
        label=point.label,
        parameters={
            "rate": point.rate,
            "concurrency": point.concurrency,
            "replicas": section.replicas,
            "router": section.router.value,
        },
        metrics=metrics,
    )


def _run(
    section: SimulateSection,
    job: LoadJob,
    spec: EngineSpec,
    vocab_size: int,
    show: Callable[[int], None],
) -> SimulationResults:
    depends = (
        job.concurrency or job.max_concurrency or any(one.after is not None for one in job.requests)
    )
    if depends and section.rounds > 1:
        raise ConfigError(
            f"simulate.rounds={section.rounds}, but the times of these requests depend on earlier "
            "answers; set simulate.rounds=1, or load.rates without load.concurrency, "
            "load.max_concurrency and conversations"
        )
    if depends:
        return simulate_job(
            spec, job, num_replicas=section.replicas, router=section.router.value, on_request=show
        )
    last = max(one.at_s or 0.0 for one in job.requests)
    period = last * (1 + 1 / max(1, len(job.requests) - 1))
    return simulate_open(
        spec,
        JobTraffic(job.requests, section.rounds, period, vocab_size),
        num_replicas=section.replicas,
        router=section.router.value,
        num_processes=section.processes or os.cpu_count() or 1,
        on_request=show,
    )
