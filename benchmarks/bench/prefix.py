"""`run bench prefix`: measures the time that prefix caching saves.

    run bench prefix bench.shares=[0,0.5,0.9] workload.input_len=512

For each share of the prompt that all requests have in common, three cases are measured: one request
with an empty cache, one whose prefix is cached, and a batch of requests with an empty cache.
"""

from __future__ import annotations

import random

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.bench.throughput import (
    EngineUnderTest,
    Measurement,
    engine_notes,
    measure,
    metrics_of,
    start_engine,
)
from ostinato.benchmarks.report.record import Metric, Point, Record, conditions_of
from ostinato.benchmarks.workload.workload import Part, WorkItem
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig

__all__ = ("prefix",)

_BATCH = 16


def prefix(config: RunConfig, context: BenchContext) -> Record:
    """Measure each share in turns.

    Raises:
        ConfigError: the prompts do not fit the context.
        StartupError: the engine cannot start.
        EngineError: a request gave another number of tokens than it asked for.
    """
    section, work = config.bench, config.workload
    engine = start_engine(config, context)
    try:
        limit = engine.llm.model.max_model_len
        if work.input_len + work.output_len > limit:
            raise ConfigError(
                f"workload.input_len={work.input_len} + workload.output_len={work.output_len} "
                f"exceed the context of {limit} tokens"
            )
        count = work.num_requests or _BATCH
        found: dict[float, list[tuple[Measurement, Measurement, Measurement]]]
        found = {share: [] for share in section.shares}
        source = random.Random(work.seed)
        for number in range(section.warmup + section.repeats):
            for share, runs in found.items():
                context.show(f"round {number + 1}: {share:.0%} in common")
                one = _measure_share(engine, source, share, count, config)
                if number >= section.warmup:
                    runs.append(one)
        points: list[Point] = []
        for share, runs in found.items():
            metrics = metrics_of([batch for _, _, batch in runs])
            cold = [1000 * (one.first_token_s or 0.0) for one, _, _ in runs]
            cached = [1000 * (one.first_token_s or 0.0) for _, one, _ in runs]
            metrics = {
                "ttft_cold": Metric.of(cold, "ms", "lower"),
                "ttft_cached": Metric.of(cached, "ms", "lower"),
                **metrics,
            }
            points.append(
                Point(label=f"{share:.0%} shared", parameters={"share": share}, metrics=metrics)
            )
        return Record(
            kind=section.kind.value,
            conditions=conditions_of(config, **engine.conditions()),
            points=points,
            notes=engine_notes(engine.llm.stats()),
        )
    finally:
        engine.llm.close()


def _measure_share(
    engine: EngineUnderTest,
    source: random.Random,
    share: float,
    count: int,
    config: RunConfig,
) -> tuple[Measurement, Measurement, Measurement]:
    """(a request with an empty cache, one with a cached prefix, a batch with an empty cache)."""
    work, vocabulary = config.workload, range(engine.llm.model.vocab_size)
    shared = int(share * work.input_len)

    def items(number: int) -> list[WorkItem]:
        common = source.choices(vocabulary, k=shared)
        return [
            WorkItem(
                common + source.choices(vocabulary, k=work.input_len - shared), work.output_len
            )
            for _ in range(number)
        ]

    first, second = items(2)
    return (
        measure(engine, Part("cold", [first])),
        measure(engine, Part("cached", [second]), reset=False),
        measure(engine, Part("batch", items(count))),
    )
