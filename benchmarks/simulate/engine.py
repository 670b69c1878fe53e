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
    prompt_scale: float = 1.0  # the same, for steps of prompts alone
    mixed_scale: float = 1.0  # the same, for steps with both
    step_s: float = 0.0  # of every step
    token_s: float = 0.0  # of every token that a step gives
    request_s: float = 0.0  # from the client's send until the engine has the request
    # What a gap between tokens is off its step by, in seconds, at evenly spread shares of all gaps,
    # ascending: delivery and the machine's disturbances. Empty = nothing.
    jitter_s: tuple[float, ...] = ()


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
    """Seconds of steps, and of the gaps between tokens that come of them.

    Args:
        costs: the table.
        overheads: on top of it.
    """

    def __init__(self, costs: CostTable, overheads: Overheads) -> None:
        self._costs = costs
        self._overheads = overheads
        self._draw = random.Random(0)
        # Early and late deliveries cancel out; what is left over takes its time in every step.
        mean = fmean(overheads.jitter_s) if overheads.jitter_s else 0.0
        self._step_s = overheads.step_s + mean
        self._jitter_s = tuple(one - mean for one in overheads.jitter_s)

    def step(self, output: SchedulerOutput) -> float:
        """Seconds of a scheduled step."""
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
        scale = over.decode_scale
        if chunks:
            scale = over.mixed_scale if num_decodes else over.prompt_scale
        seconds = scale * self._costs.mixed_seconds(num_decodes, mean, chunks)
        return max(seconds + self._step_s + over.token_s * num_samples, 0.0)

    def decodes(self, num_seqs: int, context: float) -> float:
        """Seconds of a step in which `num_seqs` sequences of a mean context decode."""
        over = self._overheads
        seconds = over.decode_scale * self._costs.decode_seconds(num_seqs, context)
        return max(seconds + self._step_s + over.token_s * num_seqs, 0.0)

    def gap(self, seconds: float) -> float:
        """A gap between tokens of a step of `seconds`, as it reaches the client."""
        jitter = self._jitter_s
        return max(0.0, seconds + self._draw.choice(jitter)) if jitter else seconds

    def gaps(self, seconds: float, count: int) -> list[tuple[float, int]]:
        """`count` gaps of steps of `seconds` each, as (seconds, how often)."""
        jitter = self._jitter_s
        if not jitter:
            return [(seconds, count)]
        size = len(jitter)
        shares = [(number + 1) * count // size - number * count // size for number in range(size)]
        return [(max(0.0, seconds + one), n) for one, n in zip(jitter, shares, strict=True) if n]
