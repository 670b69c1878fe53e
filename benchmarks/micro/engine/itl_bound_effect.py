"""Measures the ITL of streams while long prompts arrive, with and without `itl_target_ms`.

    python -m ostinato.benchmarks.micro.engine.itl_bound_effect model=llama-45m [key=value ...]

One engine for each target in `TARGETS_MS` runs in this process, in turns. Streams decode all the
time, and long prompts arrive one after the other. The program prints one JSON object: percentiles
of the gaps between the streams' tokens, the TTFT of the long prompts, and the predictions of the
step-cost table for a decode of all streams and for a whole long prompt in one step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.conf.compose import load_config
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.machine_info import gpu_names
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

__all__ = ("Round", "run_round")

TARGETS_MS = (None, 60.0, 30.0)
ROUNDS = 4
NUM_STREAMS = 4
STREAM_TOKENS = 160
STREAM_PROMPT_TOKENS = 32
# A long prompt arrives each time that the first stream reaches one of these numbers of tokens.
ARRIVALS = (20, 60, 100)
LONG_PROMPT_TOKENS = 1500
LONG_TOKENS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The figures of one run of the workload."""

    target_ms: float | None
    itl_ms: list[float]  # every gap between two tokens of a stream
    ttft_ms: list[float]  # the TTFT of each long prompt
    seconds: float  # until all requests had ended
    other_cpu: float  # share of the cores that other programs used

    def figures(self) -> dict[str, Any]:
        percentiles = quantiles(self.itl_ms, n=100)
        return {
            "target_ms": self.target_ms,
            "itl_p50_ms": round(percentiles[49], 2),
            "itl_p90_ms": round(percentiles[89], 2),
            "itl_p99_ms": round(percentiles[98], 2),
            "itl_max_ms": round(max(self.itl_ms), 2),
            "ttft_median_ms": round(median(self.ttft_ms), 1),
            "seconds": round(self.seconds, 3),
            "other_cpu": round(self.other_cpu, 3),
        }


def run_round(engine: Engine, target_ms: float | None, vocab_size: int, seed: int) -> Round:
    """Run the workload once, greedily, with an empty prefix cache."""
    numbers = random.Random(seed)
    added: dict[str, float] = {}
    times: dict[str, list[float]] = {}

    def add(name: str, num_prompt_tokens: int, max_tokens: int) -> None:
        prompt = [numbers.randrange(1, vocab_size) for _ in range(num_prompt_tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        added[name], times[name] = time.perf_counter(), []

    engine.reset_prefix_cache()
    load = LoadMeter()
    begin = time.perf_counter()
    for index in range(NUM_STREAMS):
        add(f"stream-{index}", STREAM_PROMPT_TOKENS, STREAM_TOKENS)
    waiting = list(ARRIVALS)
    while engine.has_work:
        if waiting and len(times["stream-0"]) >= waiting[0]:
            add(f"long-{waiting.pop(0)}", LONG_PROMPT_TOKENS, LONG_TOKENS)
        for output in engine.step():
            times[output.request_id].append(time.perf_counter())
    gaps = [
        1e3 * (late - early)
        for name, stamps in times.items()
        if name.startswith("stream")
        for early, late in pairwise(stamps)
    ]
    firsts = [1e3 * (times[name][0] - added[name]) for name in times if name.startswith("long")]
    return Round(
        target_ms=target_ms,
        itl_ms=gaps,
        ttft_ms=firsts,
        seconds=time.perf_counter() - begin,
        other_cpu=load.stop(),
    )


def _pooled(rounds: list[Round]) -> dict[str, Any]:
    return Round(
        target_ms=rounds[0].target_ms,
        itl_ms=[gap for one in rounds for gap in one.itl_ms],
        ttft_ms=[ttft for one in rounds for ttft in one.ttft_ms],
        seconds=median(one.seconds for one in rounds),
        other_cpu=max(one.other_cpu for one in rounds),
    ).figures()


def main(overrides: list[str]) -> None:
    """Measure and print. The step-cost table is measured once and shared through a bundle."""
    with tempfile.TemporaryDirectory() as bundles:
        engines = []
        for target in TARGETS_MS:
            target_text = "null" if target is None else f"{target:g}"
            config = load_config(
                [*overrides, f"scheduler.itl_target_ms={target_text}"],
                values={"graphs.bundle_dir": bundles},
            )
            engines.append(build_engine(config))
    vocab_size = engines[0].model.vocab_size
    rounds: dict[float | None, list[Round]] = {target: [] for target in TARGETS_MS}
    for number in range(1 + ROUNDS):  # the first is a warm-up
        for target, engine in zip(TARGETS_MS, engines, strict=True):
            one = run_round(engine, target, vocab_size, number)
            if number:
                rounds[target].append(one)
    table = engines[0].cost_table
    assert table is not None, "the configuration measures step costs"
    record = {
        "metric": "itl_bound",
        **basic_conditions(),
        "overrides": overrides,
        "model": engines[0].model.name,
        "workload": {
            "streams": NUM_STREAMS,
            "stream_tokens": STREAM_TOKENS,
            "long_prompts": len(ARRIVALS),
            "long_prompt_tokens": LONG_PROMPT_TOKENS,
            "rounds": ROUNDS,
        },
        "gpus": gpu_names(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "limits": [engines[0].stats().max_num_seqs, engines[0].stats().max_num_batched_tokens],
        "predicted_ms": {
            f"decode of {NUM_STREAMS}": round(
                1e3 * table.decode_seconds(NUM_STREAMS, STREAM_TOKENS / 2), 2
            ),
            f"prompt of {LONG_PROMPT_TOKENS}": round(
                1e3 * table.step_seconds(LONG_PROMPT_TOKENS, 1, 0), 1
            ),
        },
        "results": [_pooled(part) for part in rounds.values()],
        "rounds": [one.figures() for part in rounds.values() for one in part],
        "late_compiles": [len(engine.stats().late_compiles) for engine in engines],
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
