"""Stages that run the engine: decode, prefill, the offline workload, and a start.

Decode is compared with the roofline, and prefill with the measured rate of matrix products.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from typing import Any

import msgspec
import torch

from ostinato.benchmarks.machine.gpu_rates import measure_machine
from ostinato.benchmarks.machine.roofline import Machine, ModelSizes, sizes_of
from ostinato.conf.compose import load_config
from ostinato.conf.root import RunConfig
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.startup.plan.model_source import open_model
from ostinato.runtime.types.engine_info import EngineStats
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

__all__ = (
    "MAX_TOKEN_ID",
    "EngineUnderTest",
    "decode",
    "offline",
    "offline_lengths",
    "prefill",
    "stage_config",
    "startup_once",
)

_WARM_UP_STEPS = 8
_PROFILED_STEPS = 8
MAX_TOKEN_ID = 10_000
"""Token ids of random prompts are below this; only the tiny model has a smaller vocabulary."""
_TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "dtype": "float32",
}


def stage_config(model: str, overrides: list[str], *, tiny: bool) -> RunConfig:
    """The configuration of a stage: the shape of the preset `model`, with random weights.

    With `tiny`, it has two small layers that are not compiled, and runs on any machine.
    """
    common = ["model.load_format=dummy", "cache.enable_prefix_caching=false"]
    if tiny:
        small = ["graphs.mode=eager", "cache.memory_gib=0.01", "scheduler.max_num_seqs=8"]
        small += ["scheduler.max_num_batched_tokens=64", "graphs.pack_weights=false"]
        small += [word for word in overrides if word.startswith("cache.")]
        return load_config([*common, *small], values={"model.config": _TINY_MODEL})
    return load_config([f"model={model}", *common, *overrides])


class EngineUnderTest:
    """An engine, its model's sizes, and the machine's rates, which are measured first."""

    def __init__(self, config: RunConfig, *, tiny: bool) -> None:
        source = open_model(config)
        self.device = source.device
        self.machine: Machine = measure_machine(source.device, source.dtype, tiny=tiny)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.sizes: ModelSizes = sizes_of(source.config, source.dtype, source.cache_dtype)
        begin = time.perf_counter()
        self.engine: Engine = build_engine(config)
        gc.collect()
        gc.freeze()  # as the engine's process does: a collection of these objects takes 0.2 s
        self.token_budget = self.engine.stats().max_num_batched_tokens
        self.startup_s = time.perf_counter() - begin
        self._max_id = min(MAX_TOKEN_ID, source.config.vocab_size)
        self._numbers = random.Random(0)
        self._count = 0

    def add(self, length: int, max_tokens: int, temperature: float = 0.0) -> None:
        """Queue a request with a random prompt; it runs past end-of-sequence tokens."""
        self._count += 1
        prompt = [self._numbers.randrange(self._max_id) for _ in range(length)]
        sampling = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=self._count
        )
        self.engine.add_request(
            Request(request_id=str(self._count), prompt_token_ids=prompt, sampling=sampling)
        )

    def run(self) -> float:
        """Seconds until every request has ended."""
        begin = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - begin

    def conditions(self) -> dict[str, Any]:
        stats = self.engine.stats()
        return {
            "machine": dataclasses.asdict(self.machine),
            "sizes": dataclasses.asdict(self.sizes),
            "startup_s": self.startup_s,
            "startup_phases_s": self.engine.model.startup_seconds,
            "steps_by_kind": stats.steps_by_kind,
            "late_compiles": [msgspec.structs.asdict(late) for late in stats.late_compiles],
        }


def decode(config: RunConfig, *, tiny: bool) -> dict[str, Any]:
    """Measure decode steps of full batches: their share of the roofline, and the host's gap."""
    tested = EngineUnderTest(config, tiny=tiny)
    batches, context, steps = ((1, 2, 8), 16, 8) if tiny else ((1, 8, 64, 256), 2048, 64)
    rows = [_decode_batch(tested, batch, context, steps) for batch in batches]
    return {"rows": rows, **tested.conditions()}


def _decode_batch(tested: EngineUnderTest, batch: int, context: int, steps: int) -> dict[str, Any]:
    engine = tested.engine
    # Prompts are computed in several steps. The first sequence must not end before the last starts.
    most_ahead = 2 + batch * context // tested.token_budget
    for _ in range(batch):
        tested.add(context, most_ahead + 2 * _WARM_UP_STEPS + steps + _PROFILED_STEPS)
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step() if output.new_token_ids}
    for _ in range(_WARM_UP_STEPS):
        engine.step()
    before, begin = engine.stats(), time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - begin
    after = engine.stats()
    kernels = _kernels(engine, _PROFILED_STEPS) if tested.device.type == "cuda" else []
    tokens = after.num_output_tokens - before.num_output_tokens
    at = context + most_ahead // 2 + _WARM_UP_STEPS + steps // 2
    engine.abort_all()
    tested.run()
    count = after.num_steps - before.num_steps
    step_s, device_s = seconds / count, _device_s(before, after) / count
    needed = tested.sizes.decode_bytes(batch, at), tested.sizes.decode_flop(batch, at)
    least_s = tested.machine.least_seconds(*needed)
    return {
        "batch": batch,
        "context": at,
        "steps": count,
        "tokens_per_step": tokens / count,
        "step_ms": step_s * 1000,
        "device_step_ms": device_s * 1000,
        "host_gap": 1 - device_s / step_s,
        "tok_s": tokens / seconds,
        "least_ms": least_s * 1000,
        "share_of_roofline": least_s / step_s,
        "share_of_roofline_on_device": least_s / device_s if device_s else None,
        "share_of_copy_bandwidth": needed[0] / step_s / tested.machine.copy_bytes_s,
        "kernels": kernels,
    }


def _kernels(engine: Engine, steps: int) -> list[dict[str, Any]]:
    """Run more steps under torch's profiler: launches and microseconds a step of every kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    rows = [
        {
            "kernel": event.key[:120],
            "launches": event.count / steps,
            "us": event.self_device_time_total / steps,
        }
        for event in profiler.key_averages()
        if event.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _device_s(before: EngineStats, after: EngineStats) -> float:
    return after.device_seconds - before.device_seconds


def prefill(config: RunConfig, *, tiny: bool) -> dict[str, Any]:
    """Measure requests with one output token: their flops relative to the measured matrix rate."""
    tested = EngineUnderTest(config, tiny=tiny)
    rows = []
    for length, count in ((16, 4), (48, 2)) if tiny else ((512, 128), (2048, 32), (8192, 8)):
        for repeat in range(3):
            for _ in range(count):
                tested.add(length, 1)
            before = tested.engine.stats()
            seconds = tested.run()
            device_s = _device_s(before, tested.engine.stats())
            flop = tested.sizes.prefill_flop(count, length)
            if repeat:  # the first warms up
                rows.append(
                    {
                        "length": length,
                        "prompts": count,
                        "seconds": seconds,
                        "tok_s": count * length / seconds,
                        "mfu": flop / seconds / tested.machine.matmul_flop_s,
                        "mfu_on_device": flop / device_s / tested.machine.matmul_flop_s,
                    }
                )
    return {"rows": rows, **tested.conditions()}


def offline_lengths(*, tiny: bool) -> list[tuple[int, int]]:
    """Numbers of prompt and output tokens of the offline workload's requests."""
    count, low, high = (8, 4, 30) if tiny else (256, 100, 1024)
    numbers = random.Random(0)
    return [(numbers.randint(low, high), numbers.randint(low, high)) for _ in range(count)]


def offline(config: RunConfig, *, tiny: bool) -> dict[str, Any]:
    """The offline workload of nano-vllm: 256 requests at once, 100-1024 tokens in, 100-1024 out.

    It runs twice, as in vLLM's stage. The first run also loads kernels; only the second is timed.

    Raises:
        RuntimeError: the engine gave another number of tokens than the workload has.
    """
    tested = EngineUnderTest(config, tiny=tiny)
    lengths = offline_lengths(tiny=tiny)
    _run_workload(tested, lengths)
    before = tested.engine.stats()
    seconds = _run_workload(tested, lengths)
    after = tested.engine.stats()
    outputs = sum(max_tokens for _, max_tokens in lengths)
    produced = after.num_output_tokens - before.num_output_tokens
    if produced != outputs:
        raise RuntimeError(f"the workload has {outputs} output tokens, the engine gave {produced}")
    return {
        "requests": len(lengths),
        "prompt_tokens": sum(length for length, _ in lengths),
        "output_tokens": outputs,
        "seconds": seconds,
        "output_tok_s": outputs / seconds,
        "host_gap": 1 - _device_s(before, after) / seconds,
        "preemptions": after.num_preemptions - before.num_preemptions,
        **tested.conditions(),
    }


def _run_workload(tested: EngineUnderTest, lengths: list[tuple[int, int]]) -> float:
    """Seconds for requests with these numbers of prompt and output tokens, all sent at once."""
    for length, max_tokens in lengths:
        tested.add(length, max_tokens, 0.6)
    return tested.run()


def startup_once(config: RunConfig) -> dict[str, Any]:
    """One start in this process, its first token included."""
    begin = time.perf_counter()
    engine = build_engine(config)
    ready_s = time.perf_counter() - begin
    engine.add_request(
        Request(
            request_id="first",
            prompt_token_ids=[5, 6, 7],
            sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        )
    )
    while engine.has_work:
        engine.step()
    return {
        "ready_s": ready_s,
        "first_token_s": time.perf_counter() - begin,
        "phases_s": engine.model.startup_seconds,
    }
