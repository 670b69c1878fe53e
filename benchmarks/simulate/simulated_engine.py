"""The description of a simulated engine: limits, memory, and how long its steps take.

Plain data without torch, so that a simulation can run in other processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ostinato.benchmarks.simulate.step_times.overheads import ServingOverheads
from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits, decide_limits
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.itl_bound import ItlBound

__all__ = ("EngineSpec",)


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
    overheads: ServingOverheads | None = None  # what a real server adds; None = nothing
    seed: int = 0  # of what is drawn from `overheads`

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
