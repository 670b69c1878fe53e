"""Gate checks of the host's work in each step.

The references are a fixed loop in Python, plain BLAKE2b, and plain msgpack.
"""

from __future__ import annotations

import time
from hashlib import blake2b

import msgspec

from ostinato.benchmarks.gate.check import Check
from ostinato.benchmarks.simulate.fleet import simulate_open
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.simulated_replica import Arrival
from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.kv.block_pool import hash_blocks, hash_root
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.process.ipc import EngineOutputs, encoder, engine_decoder
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.types.outputs import SequenceOutput
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult

__all__ = ("host_checks", "python_loop")

_SEQS = 32
_BLOCK_SIZE = 16
_LENGTH = 4096  # tokens of a sequence; before it is full, `prepare` starts new sequences


def python_loop() -> dict[int, list[int]]:
    """Fixed work of the kind that a scheduler does: objects, lists, dictionaries, integers."""
    entries: dict[int, list[int]] = {}
    for number in range(400):
        entries.setdefault(number % 37, []).append(number * 3 + 1)
    for key, values in entries.items():
        values.append(sum(values) - key)
    return entries


class _DecodingScheduler:
    """A scheduler in which 32 sequences decode without end."""

    def __init__(self) -> None:
        self._result = StepResult([17] * _SEQS)
        self._steps_left = 0

    def prepare(self) -> None:
        if self._steps_left > 200:
            return
        self._steps_left = _LENGTH - 128
        cache = KVCacheManager(_SEQS * (_LENGTH // _BLOCK_SIZE + 2), _BLOCK_SIZE)
        config = SchedulerConfig(max_num_seqs=_SEQS, max_num_batched_tokens=_SEQS * 64)
        self._scheduler = Scheduler(config, cache, max_model_len=_LENGTH)
        for index in range(_SEQS):
            prompt = [index * 64 + position for position in range(1 + 2 * index)]
            sampling = SamplingParams(max_tokens=_LENGTH - len(prompt), ignore_eos=True)
            self._scheduler.add(
                Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)
            )
        self.step()

    def step(self) -> None:
        output = self._scheduler.schedule()
        assert output is not None, "all sequences have tokens left"
        self._scheduler.update(output, self._result)
        self._steps_left -= 1


def _admission() -> None:
    """32 prompts of 256 tokens with the same first half, from arrival to the second token."""
    cache = KVCacheManager(2048, _BLOCK_SIZE)
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=32 * 256)
    scheduler = Scheduler(config, cache, max_model_len=512)
    for index in range(32):
        prompt = [*range(128), *range(1000 * index, 1000 * index + 128)]
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    while (output := scheduler.schedule()) is not None:
        samples = sum(entry.num_logits for entry in output.scheduled)
        scheduler.update(output, StepResult([7] * samples))


def _simulation() -> None:
    """60 requests through the simulator."""
    spec = EngineSpec(
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
        upper=StepLimits(16, 256),
        num_blocks=1025,
        block_size=_BLOCK_SIZE,
        max_model_len=512,
        costs=CostTable(
            tokens=(1, 256),
            seqs=(1, 16),
            contexts=(0,),
            seconds=(0.01, 0.02, 0.1, 0.11),
            decode=(0.01, 0.02),
        ),
    )
    arrivals = [Arrival(0.2 * i, range(999 * i, 999 * i + 100), 60) for i in range(60)]
    simulate_open(spec, lambda: iter(arrivals))


def host_checks() -> list[Check]:
    """All checks of this module. They load no model."""
    decoding = _DecodingScheduler()
    ids = list(range(8192))
    data = bytes(4 * _BLOCK_SIZE + 32)

    def hash_raw() -> None:
        for _ in range(len(ids) // _BLOCK_SIZE):
            blake2b(data, digest_size=32).digest()

    outputs = EngineOutputs([SequenceOutput(f"request-{i}", [i]) for i in range(_SEQS)], None)
    encode = encoder()

    def cross_border() -> None:
        engine_decoder.decode(encode.encode(outputs))

    plain = [[f"request-{i}", [i]] for i in range(_SEQS)]

    def cross_plain() -> None:
        msgspec.msgpack.decode(msgspec.msgpack.encode(plain))

    return [
        Check(
            name="scheduler step",
            what="schedule and update of 32 decodes / a fixed Python loop",
            ours=decoding.step,
            reference=python_loop,
            clock=time.process_time,
            prepare=decoding.prepare,
            repeats=40,
        ),
        Check(
            name="admission",
            what="32 prompts through scheduler and block pool / a fixed Python loop",
            ours=_admission,
            reference=python_loop,
            clock=time.process_time,
        ),
        Check(
            name="prefix digests",
            what="digests of 8192 tokens / BLAKE2b of as many bytes",
            ours=lambda: hash_blocks(hash_root(""), ids, _BLOCK_SIZE),
            reference=hash_raw,
            clock=time.process_time,
        ),
        Check(
            name="step outputs",
            what="32 tokens to msgpack and back / the same as plain lists",
            ours=cross_border,
            reference=cross_plain,
            clock=time.process_time,
        ),
        Check(
            name="simulator",
            what="60 simulated requests / a fixed Python loop",
            ours=_simulation,
            reference=python_loop,
            clock=time.process_time,
        ),
    ]
