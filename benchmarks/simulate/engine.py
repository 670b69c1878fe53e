"""What a simulated engine is: its limits and memory, and how long its steps take.

Plain data without torch, so that a simulation can be handed to other processes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.cost_table import Chunk, CostTable
from ostinato.runtime.itl_bound import ItlBound
from ostinato.runtime.kv_cache import KVCacheManager
from ostinato.runtime.limits import StepLimits, decide_limits
from ostinato.runtime.types import SchedulerOutput

__all__ = ("EngineSpec", "Overheads", "StepClock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What serving costs on top of the step-cost table, measured (benchmarks/simulate/fit.py).

    The table times steps of an engine that is alone. A server also schedules, sends every token to
    another process and writes it to a socket; on a CPU that takes cores from the model's threads.
    """

    decode_scale: float = 1.0  # of the table's seconds, for steps in which all decode
    prompt_scale: float = 1.0  # the same, for steps with parts of prompts
    step_s: float = 0.0  # of every step
    token_s: float = 0.0  # of every token that a step gives
    request_s: float = 0.0  # from the client's send until the engine has the request
    # A step's seconds over the usual ones, at evenly spread shares of all steps, ascending: the
    # machine's disturbances. Empty = there are none.
    jitter: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine as the simulator builds it; all replicas of a fleet are alike."""

    scheduler: SchedulerConfig
    upper: StepLimits  # what buffers are made for; the costs may lower what is used of it
    num_blocks: int  # of the KV cache, the null block included
    block_size: int  # tokens
    max_model_len: int  # tokens
    costs: CostTable
    prefix_caching: bool = True
    overlap: bool = False  # one step is scheduled while another one runs
    overheads: Overheads = field(default_factory=Overheads)

    @cached_property
    def limits(self) -> StepLimits:
        """The largest step, decided as a start of the engine would."""
        return decide_limits(self.scheduler, self.upper, self.costs).limits

    def cache(self) -> KVCacheManager:
        """A new KV cache."""
        return KVCacheManager(
            self.num_blocks, self.block_size, enable_prefix_caching=self.prefix_caching
        )

    def bound(self) -> ItlBound | None:
        """The target for inter-token latency, when there is one."""
        target_ms = self.scheduler.itl_target_ms
        if target_ms is None:
            return None
        return ItlBound(self.costs, target_ms / 1e3, least_chunk=self.block_size)


class StepClock:
    """Seconds of steps: the table's, the overheads' and the machine's disturbances.

    Args:
        costs: the table.
        overheads: on top of it.
    """

    def __init__(self, costs: CostTable, overheads: Overheads) -> None:
        self._costs = costs
        self._overheads = overheads
        self._draw = random.Random(0)
        self._mean_jitter = fmean(overheads.jitter) if overheads.jitter else 1.0

    def step(self, output: SchedulerOutput) -> float:
        """Seconds of a scheduled step, one draw of the disturbances included."""
        num_decodes = context = num_samples = 0
        chunks: list[Chunk] = []
        for entry in output.scheduled:
            num_samples += entry.samples
            if entry.token_ids:
                chunks.append(Chunk(entry.num_new_tokens, entry.start))
            else:
                num_decodes += 1
                context += entry.start
        mean = context / num_decodes if num_decodes else 0.0
        over = self._overheads
        scale = over.prompt_scale if chunks else over.decode_scale
        seconds = scale * self._costs.mixed_seconds(num_decodes, mean, chunks)
        seconds += over.step_s + over.token_s * num_samples
        return seconds * self._draw.choice(over.jitter) if over.jitter else seconds

    def decodes(self, num_seqs: int, context: float) -> float:
        """Seconds of a step in which `num_seqs` sequences of a mean context decode, on average."""
        over = self._overheads
        seconds = over.decode_scale * self._costs.decode_seconds(num_seqs, context)
        return (seconds + over.step_s + over.token_s * num_seqs) * self._mean_jitter

    def spread(self, seconds: float, count: int) -> list[tuple[float, int]]:
        """`count` gaps of `seconds` on average as (seconds, how often), with the disturbances."""
        jitter = self._overheads.jitter
        if not jitter:
            return [(seconds, count)]
        usual, size = seconds / self._mean_jitter, len(jitter)
        shares = [(number + 1) * count // size - number * count // size for number in range(size)]
        return [(usual * one, n) for one, n in zip(jitter, shares, strict=True) if n]
