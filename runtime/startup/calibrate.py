"""Measures step costs when the engine starts. Chooses decode buckets, limits and the ITL bound.

This runs once, after the capture of graphs and before the first request.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

import msgspec

from ostinato.conf.schema import GraphConfig, SchedulerConfig
from ostinato.graphs.buckets import verified_tokens
from ostinato.graphs.bundle import Bundle
from ostinato.runtime.costs.cost_probe import StepSpace, measure_costs
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits, decide_limits, redundant_sizes
from ostinato.runtime.costs.token_rate import TokenRate
from ostinato.runtime.errors import StartupError
from ostinato.runtime.execution.executor import (
    DropDecodeBuckets,
    Executor,
    ResetCounters,
    TouchBlocks,
)
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.machine_info import cpu_name
from ostinato.runtime.memory.memory_plan import MemoryPlan
from ostinato.runtime.scheduling.decode_shares import DecodeShares
from ostinato.runtime.scheduling.itl_bound import ItlBound
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.speculation.proposer import Proposer
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.params import SamplingParams

__all__ = ("CostStore", "calibrate", "make_scheduler")

_LOG = logging.getLogger(__name__)

# Bytes of KV cache that measured steps read. It is more than the caches of most processors hold.
_CONTEXT_BYTES = 32 << 20
_CONTEXT_BLOCKS = 512  # the same, if only other stages have layers with keys and values


@dataclass(frozen=True, slots=True)
class CostStore:
    """Step-cost tables in a bundle, so that a later start need not measure again.

    Several machines and configurations can use one bundle. Each has a table of its own in it.
    """

    graphs: GraphConfig
    limits: StepLimits  # the limits that buffers are sized for
    threads: int  # threads of the model on a CPU
    num_stages: int  # stages of the pipeline
    bundle: Bundle | None  # the caller saves it; None = tables are not stored

    @property
    def is_wanted(self) -> bool:
        """Whether step costs are to be measured."""
        return self.graphs.cost_table_budget_s != 0

    def load(self) -> CostTable | None:
        """The stored table for this machine and these limits, or None."""
        if self.bundle is None or not self.is_wanted:
            return None
        data = self.bundle.get(self._name())
        if data is None:
            return None
        try:
            return CostTable.from_bytes(data)
        except ValueError as error:
            _LOG.warning("step costs are measured again: %s", error)
            return None

    def put(self, costs: CostTable) -> None:
        """Store a table for the next start."""
        if self.bundle is not None:
            self.bundle.put(self._name(), costs.to_bytes())

    def _name(self) -> str:
        graphs = self.graphs
        kind = (
            *CostTable.__struct_fields__,
            *(cpu_name(), self.threads, self.num_stages),
            *(graphs.mode.value, graphs.capture_sizes),
            *self.limits,
        )
        return f"step-costs-{hashlib.sha256(repr(kind).encode()).hexdigest()[:12]}.msgpack"


def calibrate(
    store: CostStore, executor: Executor, plan: MemoryPlan, model: ServedModel, *, is_cpu: bool
) -> CostTable:
    """Measure steps before the first request, and drop the decode buckets that save no time.

    Args:
        store: has the limits and the time budget. The table is stored in it.
        executor: has captured all graphs and uses no block. Its counters are reset.
        plan: the engine's memory plan.
        model: has the default sampling parameters.
        is_cpu: whether the executor's device is a CPU.
    """
    limits = store.limits
    limits = limits._replace(max_num_seqs=plan.running_seqs(limits.max_num_seqs))
    size = plan.bytes_per_block
    num_blocks = _CONTEXT_BYTES // size if size else _CONTEXT_BLOCKS
    num_blocks = max(1, min(plan.num_blocks - 1, num_blocks))
    if is_cpu:
        executor.call(TouchBlocks(num_blocks))
    buckets = executor.stats().decode_buckets
    sizes = [size for size in buckets if size <= limits.max_num_seqs] or buckets[:1]
    if is_cpu or not buckets:
        most = limits.max_num_seqs
        sizes = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
    costs = measure_costs(
        lambda output: executor.read(executor.launch(output)),
        StepSpace(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            vocab_size=model.vocab_size,
            decode_sizes=sizes,
            context_block_ids=range(1, num_blocks + 1),
            sampling=msgspec.convert(model.default_sampling, SamplingParams, strict=False),
            verified_tokens=verified_tokens(limits.rows_per_seq),
            max_num_rows=min(limits.max_num_rows, limits.max_num_batched_tokens),
            groups=plan.groups,
            num_states=plan.num_states,
        ),
        budget_s=store.graphs.cost_table_budget_s,
    )
    executor.call(ResetCounters())
    executor.idle()
    store.put(costs)
    # On a CPU a bucket costs nothing, but padding to a larger bucket costs time.
    redundant = [] if is_cpu else redundant_sizes(buckets, costs)
    if redundant:
        executor.call(DropDecodeBuckets(redundant))
        _LOG.info("decode buckets as slow as the next larger one are dropped: %s", redundant)
    return costs


def make_scheduler(  # noqa: PLR0913 - the parts of a scheduler
    config: SchedulerConfig,
    cache: KVCacheManager,
    max_model_len: int,
    upper: StepLimits,
    costs: CostTable | None,
    *,
    whole_prompts: bool = False,
    max_in_flight: int,
    has_lanes: bool = False,
    proposer: Proposer | None = None,
    adaptive_drafts: bool = True,
    text_step_s: float | None = None,
) -> Scheduler:
    """Make the scheduler, with limits and an ITL bound from the step costs.

    Args:
        config: the scheduler's settings.
        cache: the KV cache manager.
        max_model_len: tokens of one sequence, at most.
        upper: the limits that buffers are sized for.
        costs: the step-cost table; None = not measured.
        whole_prompts: compute each prompt in one step.
        max_in_flight: steps that may be launched before the result of the first is read.
        has_lanes: the steps in flight run on the stages of a pipeline.
        proposer: the drafter that `upper` was made for; None = no drafts.
        adaptive_drafts: choose the number of drafts by step costs.
        text_step_s: longest step of whole prompts in seconds; None = no limit. Ignored if
            scheduler.max_num_batched_tokens is set.

    Raises:
        StartupError: scheduler.itl_target_ms is set and step costs were not measured.
    """
    decided = decide_limits(config, upper, costs)
    for key, value, origin in (
        ("max_num_seqs", decided.limits.max_num_seqs, decided.seqs_origin),
        ("max_num_batched_tokens", decided.limits.max_num_batched_tokens, decided.tokens_origin),
    ):
        _LOG.info("scheduler.%s=%d (%s)", key, value, origin)
    # The log-probability of one prompt token takes as long as this many tokens take to compute.
    score_tokens = 1.0
    if costs is not None:
        score_tokens = costs.seconds_per_score / max(costs.seconds_per_token, 1e-9)
    bound = None
    if (target_ms := config.itl_target_ms) is not None:
        if costs is None:
            raise StartupError(
                f"scheduler.itl_target_ms={target_ms:g} needs measured step costs, but "
                "graphs.cost_table_budget_s=0 turns their measurement off; leave one of the two "
                "settings null"
            )
        bound = ItlBound(costs, target_ms / 1e3, least_chunk=cache.block_size)
        if (alone_ms := costs.decode_seconds(1, 0) * 1e3) > target_ms:
            _LOG.warning(
                "scheduler.itl_target_ms=%g cannot be kept: a step of one sequence takes %.1f ms; "
                "beside decodes, prompts advance by %d tokens a step",
                target_ms,
                alone_ms,
                cache.block_size,
            )
    shares = None
    if costs is not None and config.max_slowdown is not None:
        shares = DecodeShares(costs, config.max_slowdown)
    rate = None
    if text_step_s is not None and config.max_num_batched_tokens is None:
        rate = TokenRate(text_step_s)
    return Scheduler(
        config,
        cache,
        max_model_len=max_model_len,
        limits=decided.limits,
        bound=bound,
        whole_prompts=whole_prompts,
        max_in_flight=max_in_flight,
        has_lanes=has_lanes,
        proposer=proposer,
        score_tokens=score_tokens,
        draft_costs=costs if adaptive_drafts else None,
        rate=rate,
        shares=shares,
    )
