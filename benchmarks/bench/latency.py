"""`run bench latency`: batches of requests with equal lengths in this process, over a grid.

    run bench latency bench.batch_sizes=[1,8] bench.input_lens=[128,1024] bench.output_lens=[1,64]

All requests of a batch are sent at once. Each repetition has other token ids and an empty prefix
cache.
"""

from __future__ import annotations

import itertools
import random

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.bench.throughput import (
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

__all__ = ("latency",)


def latency(config: RunConfig, context: BenchContext) -> Record:
    """Measure every point of the grid that fits into the model's context, in turns.

    Raises:
        ConfigError: no point fits.
        StartupError: the engine cannot start.
        EngineError: a request gave another number of tokens than it asked for.
    """
    section = config.bench
    engine = start_engine(config, context)
    model = engine.llm.model
    try:
        grid = itertools.product(section.batch_sizes, section.input_lens, section.output_lens)
        points: list[Point] = []
        notes: list[str] = []
        source = random.Random(config.workload.seed)
        found: dict[tuple[int, int, int], list[Measurement]] = {}
        for batch, input_len, output_len in grid:
            if input_len + output_len > model.max_model_len:
                notes.append(
                    f"{input_len} + {output_len} tokens left out: the context holds "
                    f"{model.max_model_len}"
                )
                continue
            found[batch, input_len, output_len] = []
        if not found:
            raise ConfigError(
                f"bench.input_lens and bench.output_lens leave nothing: {'; '.join(notes)}"
            )
        for number in range(section.warmup + section.repeats):
            for (batch, input_len, output_len), runs in found.items():
                context.show(
                    f"round {number + 1} of {section.warmup + section.repeats}: {batch} x "
                    f"{input_len} + {output_len}"
                )
                items = [
                    WorkItem(source.choices(range(model.vocab_size), k=input_len), output_len)
                    for _ in range(batch)
                ]
                one = measure(engine, Part("grid", items))
                if number >= section.warmup:
                    runs.append(one)
        for (batch, input_len, output_len), runs in found.items():
            metrics = metrics_of(runs)
            per_token = [1000 * run.seconds / output_len for run in runs]
            metrics["time_per_output_token"] = Metric.of(per_token, "ms", "lower")
            points.append(
                Point(
                    label=f"{batch} x {input_len} + {output_len}",
                    parameters={"batch": batch, "input_len": input_len, "output_len": output_len},
                    metrics=metrics,
                )
            )
        return Record(
            kind=section.kind.value,
            conditions=conditions_of(config, **engine.conditions()),
            points=points,
            notes=notes + engine_notes(engine.llm.stats()),
        )
    finally:
        engine.llm.close()
