"""`run bench`: throughput and latency of the engine in this process, on token ids.

    run bench model=llama-45m
    run bench model=qwen3-0.6b model.load_format=dummy bench.parts=[single,offline] bench.repeats=5

Everything is greedy and runs past end-of-sequence tokens; the number of tokens is checked. Prints a
table and writes a JSON file with every single measurement and the conditions it was taken under.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

import ostinato
from ostinato.benchmarks.probes import LoadMeter, PeakMemory, commit_of, read_bandwidth
from ostinato.benchmarks.report import Measurement, print_report
from ostinato.benchmarks.workload import (
    Part,
    WorkItem,
    load_workload,
    random_part,
    standard_workload,
)
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import EngineConfig
from ostinato.conf.schema import BenchSection
from ostinato.runtime.device import resolve_device
from ostinato.runtime.errors import EngineError
from ostinato.runtime.llm import LLM
from ostinato.runtime.machine import cpu_name, gpu_names, package_versions
from ostinato.runtime.types import EngineStats, SamplingParams

__all__ = ("bench", "measure")


def bench(config: EngineConfig) -> int:
    """Run the configured workload.

    Raises:
        ConfigError: the workload is missing, malformed, or not for this model.
        StartupError: the engine can not start.
    """
    section = config.bench
    parts = _read_parts(section)
    output = _output_path(section)
    begin = time.perf_counter()
    llm = LLM(config=config)
    ready_s = time.perf_counter() - begin
    if parts is None:
        parts = [random_part(section, llm.model.vocab_size)]
    parts, notes = _fit(parts, llm)
    device = resolve_device(config.device.name)
    memory = PeakMemory()
    measurements: list[Measurement] = []
    # The parts take turns, so that a change of the machine's state does not hit one of them alone.
    for number in range(section.warmup + section.repeats):
        for part in parts:
            _show(f"round {number + 1} of {section.warmup + section.repeats}: {part.name}")
            repetition = part.repetition(number).folded(llm.model.vocab_size)
            measured = measure(llm, repetition, device, memory)
            if number >= section.warmup:
                measurements.append(measured)
    _show("")
    record = {
        "conditions": _conditions(config, llm, ready_s),
        "notes": notes,
        "peak_rss_mib": round(memory.mib),
        "peak_rss_contains_probes": not memory.forgets,
        "late_compiles": [msgspec.structs.asdict(late) for late in llm.stats().late_compiles],
        "measurements": [
            dataclasses.asdict(measured)
            | {"output_tok_s": measured.output_tok_s, "total_tok_s": measured.total_tok_s}
            for measured in measurements
        ],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_report(record, measurements, output)
    return 0


def measure(llm: LLM, part: Part, device: torch.device, memory: PeakMemory) -> Measurement:
    """One repetition from an empty prefix cache.

    Raises:
        EngineError: a request ended early or with an error.
    """
    llm.reset_prefix_cache()
    memory.note()
    bandwidth = read_bandwidth(device)
    memory.forget_probe()
    load = LoadMeter()
    before = llm.stats()
    begin = time.perf_counter()
    first: float | None = None
    decode: float | None = None
    if len(part.items) == 1:
        [item] = part.items
        first, cached = _stream_one(llm, item)
        seconds = time.perf_counter() - begin
        if item.max_tokens > 1:
            decode = (item.max_tokens - 1) / (seconds - first)
    else:
        cached = _generate_all(llm, part.items)
        seconds = time.perf_counter() - begin
    after = llm.stats()
    return Measurement(
        part=part.name,
        seconds=seconds,
        num_prompt_tokens=part.num_prompt_tokens,
        num_output_tokens=part.num_output_tokens,
        num_cached_tokens=cached,
        first_token_s=first,
        decode_tok_s=decode,
        overhead=_overhead(before, after),
        num_steps=after.num_steps - before.num_steps,
        bandwidth_gb_s=bandwidth,
        other_cpu=load.stop(),
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


def _generate_all(llm: LLM, items: Sequence[WorkItem]) -> int:
    """Cached prompt tokens of requests that are sent at once, run to their ends."""
    outputs = llm.generate(
        [item.prompt for item in items], [_sampling(item) for item in items], use_progress=False
    )
    for output, item in zip(outputs, items, strict=True):
        _check(len(output.outputs[0].token_ids), item)
    return sum(output.num_cached_tokens for output in outputs)


def _check(count: int, item: WorkItem) -> None:
    if count != item.max_tokens:
        raise EngineError(f"a request gave {count} tokens instead of {item.max_tokens}")


def _overhead(before: EngineStats, after: EngineStats) -> float:
    steps = after.step_seconds - before.step_seconds
    model = after.model_seconds - before.model_seconds
    return (steps - model) / steps if steps > 0 else 0.0


def _read_parts(section: BenchSection) -> list[Part] | None:
    """The parts to run; None for the random workload, whose ids need the model's vocabulary."""
    if section.workload == "random":
        return None
    standard = section.workload == "standard"
    parts = standard_workload() if standard else load_workload(section.workload)
    chosen = [part for part in parts if part.name in section.parts or part.name == "list"]
    if not chosen:
        raise ConfigError(
            f"bench.parts=[{','.join(section.parts)}] leaves nothing of bench.workload="
            f"{section.workload}, which has {', '.join(part.name for part in parts)}"
        )
    return chosen


def _fit(parts: list[Part], llm: LLM) -> tuple[list[Part], list[str]]:
    """The parts that the model can serve, and what was changed for it."""
    model, notes = llm.model, []
    fitting: list[Part] = []
    for part in parts:
        longest = max(item.num_tokens for item in part.items)
        if longest > model.max_model_len:
            notes.append(
                f"{part.name} left out: {longest} tokens, the context holds {model.max_model_len}"
            )
            continue
        if part.max_id >= model.vocab_size:
            if not part.shifts:
                raise ConfigError(
                    f"bench.workload: {part.name} has token id {part.max_id}, the vocabulary of "
                    f"{model.name} is [0, {model.vocab_size})"
                )
            notes.append(f"{part.name}: ids modulo the vocabulary of {model.vocab_size}")
        fitting.append(part)
    if not fitting:
        raise ConfigError(f"bench.workload does not fit {model.name}: {'; '.join(notes)}")
    return fitting, notes


def _output_path(section: BenchSection) -> Path:
    if section.output:
        path = Path(section.output).expanduser()
        if path.is_dir():
            raise ConfigError(f"bench.output={section.output} is a directory; it must be a file")
        return path
    return Path("outputs/bench") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def _conditions(config: EngineConfig, llm: LLM, ready_s: float) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "commit": commit_of(Path(ostinato.__file__).parent),
        "config": dataclasses.asdict(config),
        "model": llm.model.name,
        "max_model_len": llm.model.max_model_len,
        "startup_s": round(ready_s, 3),
        "startup_phases_s": {k: round(v, 3) for k, v in llm.model.startup_seconds.items()},
        "cpu": cpu_name(),
        "gpus": gpu_names(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "versions": package_versions(),
    }


def _show(text: str) -> None:
    """What is being done, on stderr when that is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
