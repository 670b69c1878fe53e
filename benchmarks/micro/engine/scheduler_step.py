"""Measures host microseconds of `Scheduler.schedule` plus `update` for a decode step.

    python -m ostinato.benchmarks.micro.engine.scheduler_step 1 32 256

It prints two JSON lines per number of sequences: without and with a step in flight. Prompts have
different lengths, so that blocks are filled in different steps, as in service. On a shared machine,
compare the minimum.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from statistics import median, quantiles

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult

__all__ = ("measure_decode_steps",)

_BLOCK_SIZE = 16
_MAX_PROMPT_TOKENS = 128
_NUM_WARMUP_STEPS = 50


def measure_decode_steps(
    num_seqs: int, *, lookahead: bool, prefix_caching: bool = True, num_steps: int = 400
) -> list[float]:
    """Seconds of schedule() plus update(), one entry per step in which all sequences decode.

    Args:
        num_seqs: sequences in each step.
        lookahead: whether a step is in flight while the next is scheduled.
        prefix_caching: whether full blocks are hashed and registered.
        num_steps: output tokens of each sequence.
    """
    max_model_len = _MAX_PROMPT_TOKENS + num_steps + 1
    cache = KVCacheManager(
        num_seqs * (max_model_len // _BLOCK_SIZE + 2),
        _BLOCK_SIZE,
        enable_prefix_caching=prefix_caching,
    )
    config = SchedulerConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * _MAX_PROMPT_TOKENS
    )
    scheduler = Scheduler(config, cache, max_model_len=max_model_len)
    for index in range(num_seqs):
        length = 1 + (37 * index) % _MAX_PROMPT_TOKENS
        request = Request(
            request_id=f"request-{index}",
            prompt_token_ids=[(index + 7 * position) % 50_000 for position in range(length)],
            sampling=SamplingParams(max_tokens=num_steps),
            eos_token_ids=(50_000,),
        )
        scheduler.add(request)
    result = StepResult([17] * num_seqs)
    in_flight = scheduler.schedule() if lookahead else None
    seconds: list[float] = []
    for _ in range(num_steps - 1):
        begin = time.perf_counter()
        output = scheduler.schedule()
        landing = in_flight or output
        assert landing is not None, "every sequence has tokens left"
        scheduler.update(landing, result)
        seconds.append(time.perf_counter() - begin)
        in_flight = output if lookahead else None
    return seconds[_NUM_WARMUP_STEPS:]


def main(arguments: list[str]) -> None:
    """Print figures for the numbers of sequences given, both with and without a step in flight."""
    gc.freeze()
    for num_seqs in [int(argument) for argument in arguments] or [1, 32, 256]:
        for lookahead in (False, True):
            micros = [1e6 * s for s in measure_decode_steps(num_seqs, lookahead=lookahead)]
            figures = {
                "metric": "scheduler_step",
                "unit": "us",
                "num_seqs": num_seqs,
                "lookahead": lookahead,
                "min": round(min(micros), 1),
                "median": round(median(micros), 1),
                "p99": round(quantiles(micros, n=100)[98], 1),
                "block_size": _BLOCK_SIZE,
                "python": platform.python_version(),
                "machine": platform.processor() or platform.machine(),
            }
            print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
