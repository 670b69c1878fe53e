"""`EngineSpec` describes a simulated engine by its limits, memory and step costs.

It is plain data without torch, so that a simulation can run in other processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ostinato.benchmarks.simulate.simulated_drafts import DraftSpec
from ostinato.benchmarks.simulate.step_times.overheads import ServingOverheads
from ostinato.conf.schema import SchedulerConfig
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits, decide_limits
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.itl_bound import ItlBound

__all__ = ("EngineSpec",)


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The engine of every replica of a fleet."""

    scheduler: SchedulerConfig
    upper: StepLimits  # the limits for which buffers are sized; step costs can lower them
    num_blocks: int  # blocks of the KV cache, the null block included
    block_size: int  # tokens
    groups: tuple[KVGroup, ...] = WHOLE_CACHE  # layers that have blocks of their own
    num_states: int = 0  # slots for states of recurrent layers, slot 0 included; 0 = none
    max_model_len: int  # tokens
    costs: CostTable
    prefix_caching: bool = True
    num_stages: int = 1  # stages of a pipeline; `costs` are the times through all of them
    overlap: bool = False  # one step is scheduled while another one runs
    drafts: DraftSpec | None = None  # None = no drafts
    overheads: ServingOverheads | None = None  # overheads of a real server; None = none
    seed: int = 0  # for draws from `overheads`

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched before the result of the first is read."""
        return max(self.num_stages, 2 if self.overlap else 1)

    @cached_property
    def limits(self) -> StepLimits:
        """The largest step, chosen as at the start of an engine."""
        return decide_limits(self.scheduler, self.upper, self.costs).limits

    def cache(self) -> KVCacheManager:
        """A new KV cache."""
        return KVCacheManager(
            self.num_blocks,
            self.block_size,
            enable_prefix_caching=self.prefix_caching,
            groups=self.groups,
            step_tokens=self.upper.max_num_batched_tokens,
            num_states=self.num_states,
        )

    def bound(self) -> ItlBound | None:
        """The inter-token-latency bound; None without a target."""
        target_ms = self.scheduler.itl_target_ms
        if target_ms is None:
            return None
        return ItlBound(self.costs, target_ms / 1e3, least_chunk=self.block_size)
