"""`run bench throughput` or `run bench`: measures the engine in this process, on token ids.

    run bench model=llama-45m
    run bench throughput workload=random workload.input_len=512 bench.repeats=5

All requests of a part are sent at once, conversations turn by turn. For a part of one request, the
decode rate and the time to first token are reported too. Requests are greedy and ignore
end-of-sequence tokens, and the number of output tokens is checked. Each repetition begins with an
empty prefix cache.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.load.server_metrics import counter_metrics
from ostinato.benchmarks.machine.machine_rates import measure_rates
from ostinato.benchmarks.machine.probes import EnergyMeter, LoadMeter, PeakMemory, read_bandwidth
from ostinato.benchmarks.machine.step_log import StepLog
from ostinato.benchmarks.report.record import Metric, Point, Record, conditions_of
from ostinato.benchmarks.workload.select import fit_parts, read_parts
from ostinato.benchmarks.workload.workload import Part, WorkItem
from ostinato.conf.root import RunConfig
from ostinato.runtime.engine.step_observer import StepObserver
from ostinato.runtime.errors import EngineError
from ostinato.runtime.llm import LLM
from ostinato.runtime.startup.plan.device import resolve_device
from ostinato.runtime.types.engine_info import EngineStats
from ostinato.runtime.types.params import SamplingParams

__all__ = (
    "EngineUnderTest",
    "Measurement",
    "engine_notes",
    "measure",
    "metrics_of",
    "start_engine",
    "throughput",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One repetition of one part, with the state of the machine around it."""

    seconds: float  # until the last token of all requests
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    first_token_s: float | None  # TTFT, for a single request
    decode_tok_s: float | None  # rate of the tokens after the first, for a single request
    counters: dict[str, Metric]  # growth of the engine's counters
    roofline_share: float  # least possible seconds of the steps / their seconds
    bandwidth_gb_s: float  # memory read bandwidth, measured just before
    other_cpu: float  # share of the cores that other programs used
    joules: float | None  # energy of the GPUs
    steps: dict[str, list[float]]  # name -> the figure of each step


def throughput(config: RunConfig, context: BenchContext) -> Record:
    """Measure the configured workload's parts in turns.

    Raises:
        ConfigError: the workload is missing, malformed, or not for this model.
        StartupError: the engine cannot start.
        EngineError: a request gave another number of tokens than it asked for.
    """
    section = config.bench
    if config.workload.path or config.workload.kind == "standard":
        read_parts(config.workload, 1 << 20, lambda text: [0] * len(text), section.parts)
    engine = start_engine(config, context)
    llm = engine.llm
    try:
        encode = None if llm.tokenizer is None else llm.tokenizer.encode
        parts = read_parts(config.workload, llm.model.vocab_size, encode, section.parts)
        parts, notes = fit_parts(
            parts,
            model=llm.model.name,
            max_model_len=llm.model.max_model_len,
            vocab_size=llm.model.vocab_size,
        )
        found: dict[str, list[Measurement]] = {part.name: [] for part in parts}
        # The parts take turns, so that a change of the machine's state affects all of them.
        for number in range(section.warmup + section.repeats):
            for part in parts:
                context.show(
                    f"round {number + 1} of {section.warmup + section.repeats}: {part.name}"
                )
                one = measure(engine, part.repetition(number).folded(llm.model.vocab_size))
                if number >= section.warmup:
                    found[part.name].append(one)
        points = [
            Point(
                label=part.name,
                parameters={"part": part.name, "requests": len(part.items)},
                metrics=metrics_of(found[part.name]),
                details={"steps": found[part.name][-1].steps},
            )
            for part in parts
        ]
        return Record(
            kind=section.kind.value,
            conditions=conditions_of(config, **engine.conditions()),
            points=points,
            notes=notes + engine_notes(llm.stats()),
        )
    finally:
        llm.close()


@dataclasses.dataclass(slots=True)
class EngineUnderTest:
    """An engine with its meters. `log` has the machine's rates, measured before the start."""

    llm: LLM
    log: StepLog
    device: torch.device
    memory: PeakMemory
    energy: EnergyMeter
    ready_s: float

    def conditions(self) -> dict[str, Any]:
        """The conditions that are reported with figures of this engine."""
        model, stats = self.llm.model, self.llm.stats()
        return {
            "model": model.name,
            "threads": torch.get_num_threads(),
            "max_model_len": model.max_model_len,
            "startup_s": round(self.ready_s, 3),
            "startup_phases_s": {k: round(v, 3) for k, v in model.startup_seconds.items()},
            "limits": {
                "max_num_seqs": stats.max_num_seqs,
                "max_num_batched_tokens": stats.max_num_batched_tokens,
            },
            "kv_blocks": stats.num_blocks,
            "rates": dataclasses.asdict(self.log.machine),
            "peak_rss_mib": round(self.memory.mib),
            "peak_rss_contains_probes": not self.memory.forgets,
        }


def start_engine(config: RunConfig, context: BenchContext) -> EngineUnderTest:
    """Measure the machine and build the engine.

    Raises:
        StartupError: the engine cannot start.
    """
    device = resolve_device(config.device.name)
    memory = PeakMemory()
    sizes, machine = measure_rates(config, device)
    memory.forget_probe()
    begin = time.perf_counter()
    log = StepLog(sizes, machine)
    llm = context.open_llm(config, StepObserver(on_step=log.add))
    ready_s = time.perf_counter() - begin
    return EngineUnderTest(llm, log, device, memory, EnergyMeter(), ready_s)


def measure(engine: EngineUnderTest, part: Part, *, reset: bool = True) -> Measurement:
    """Measure one repetition, with an empty prefix cache unless `reset` is off.

    Raises:
        EngineError: a request gave another number of tokens than it asked for.
    """
    llm = engine.llm
    if reset:
        llm.reset_prefix_cache()
    engine.memory.note()
    bandwidth = read_bandwidth(engine.device)
    engine.memory.forget_probe()
    load = LoadMeter()
    engine.log.clear()
    before = llm.stats()
    first: float | None = None
    decode: float | None = None
    engine.energy.start()
    begin = time.perf_counter()
    if len(part.items) == 1:
        [item] = part.items
        first, cached = _stream_one(llm, item)
        seconds = time.perf_counter() - begin
        if item.max_tokens > 1:
            decode = (item.max_tokens - 1) / (seconds - first)
    else:
        cached = _generate_all(llm, part)
        seconds = time.perf_counter() - begin
    joules = engine.energy.stop()
    return Measurement(
        seconds=seconds,
        num_prompt_tokens=part.num_prompt_tokens,
        num_output_tokens=part.num_output_tokens,
        num_cached_tokens=cached,
        first_token_s=first,
        decode_tok_s=decode,
        counters=_grown(before, llm.stats()),
        roofline_share=engine.log.roofline_share(),
        bandwidth_gb_s=bandwidth,
        other_cpu=load.stop(),
        joules=joules,
        steps=engine.log.columns(),
    )


def _sampling(item: WorkItem) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True)


def _stream_one(llm: LLM, item: WorkItem) -> tuple[float, int]:
    """(seconds to the first token, cached prompt tokens) of one request, run to its end."""
    begin = time.perf_counter()
    first, count, cached = None, 0, 0
    for output in llm.stream(item.prompt, _sampling(item)):
        if first is None and output.new_token_ids:
            first = time.perf_counter() - begin
        count += len(output.new_token_ids)
        cached = output.num_cached_tokens
    _check(count, item)
    assert first is not None, "a request of at least one token has a first one"
    return first, cached


def _generate_all(llm: LLM, part: Part) -> int:
    """Send all requests of a turn at once, turn by turn; returns the cached prompt tokens."""
    cached = 0
    history: dict[int, list[int]] = {}
    for wave in part.waves():
        items = [part.items[place] for place in wave]
        prompts = [
            item.prompt if item.after is None else history[item.after] + item.prompt
            for item in items
        ]
        outputs = llm.generate(prompts, [_sampling(item) for item in items], use_progress=False)
        for place, item, prompt, output in zip(wave, items, prompts, outputs, strict=True):
            token_ids = output.outputs[0].token_ids
            _check(len(token_ids), item)
            history[place] = prompt + token_ids
            cached += output.num_cached_tokens
    return cached


def _check(count: int, item: WorkItem) -> None:
    if count != item.max_tokens:
        raise EngineError(f"a request gave {count} tokens instead of {item.max_tokens}")


def _grown(before: EngineStats, after: EngineStats) -> dict[str, Metric]:
    computed = after.num_prompt_tokens + after.num_output_tokens
    return counter_metrics(
        steps_by_kind={
            kind: count - before.steps_by_kind.get(kind, 0)
            for kind, count in after.steps_by_kind.items()
        },
        step_seconds=after.step_seconds - before.step_seconds,
        model_seconds=after.model_seconds - before.model_seconds,
        computed_tokens=computed - before.num_prompt_tokens - before.num_output_tokens,
        padding_tokens=after.num_padding_tokens - before.num_padding_tokens,
        prefix_queries=after.prefix_queries - before.prefix_queries,
        prefix_hits=after.prefix_hits - before.prefix_hits,
        preemptions=after.num_preemptions - before.num_preemptions,
    )


def metrics_of(runs: Sequence[Measurement]) -> dict[str, Metric]:
    """The metrics of one part, each with its median and every measurement."""
    metrics: dict[str, Metric] = {}

    def add(name: str, values: Sequence[float | None], unit: str, better: str = "") -> None:
        found = [value for value in values if value is not None]
        if found:
            metrics[name] = Metric.of(found, unit, better)

    add("decode_rate", [m.decode_tok_s for m in runs], "tokens/s", "higher")
    add("ttft", [_ms(m.first_token_s) for m in runs], "ms", "lower")
    add("duration", [m.seconds for m in runs], "s", "lower")
    add("output_throughput", [m.num_output_tokens / m.seconds for m in runs], "tokens/s", "higher")
    total = [(m.num_prompt_tokens + m.num_output_tokens) / m.seconds for m in runs]
    add("total_throughput", total, "tokens/s", "higher")
    add("cached_prompt_tokens", [m.num_cached_tokens for m in runs], "tokens")
    for name in dict.fromkeys(name for m in runs for name in m.counters):
        values = [m.counters[name].value for m in runs if name in m.counters]
        first = next(m.counters[name] for m in runs if name in m.counters)
        add(name, values, first.unit, first.better)
    add("roofline_share", [m.roofline_share for m in runs], "share", "higher")
    energy = [None if m.joules is None else m.joules / m.num_output_tokens for m in runs]
    add("energy_per_output_token", energy, "J", "lower")
    add("read_bandwidth", [m.bandwidth_gb_s for m in runs], "GB/s")
    add("other_cpu", [m.other_cpu for m in runs], "share")
    return metrics


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def engine_notes(stats: EngineStats) -> list[str]:
    """Notes on compilations after the start; empty if there were none."""
    if not stats.late_compiles:
        return []
    total = sum(late.count for late in stats.late_compiles)
    parts = (f"{late.what} at {late.shape}: {late.count}" for late in stats.late_compiles)
    return [f"compilations after the start: {total} ({'; '.join(parts)})"]
