"""Builds a drafter that has weights: a draft model, or a draft head (EAGLE-3, MTP)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.models.base import LanguageModel
from ostinato.models.decoder import Decoder
from ostinato.models.draft_heads.draft_head_model import DraftHeadModel
from ostinato.ops.native.library import loaded_isa
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.errors import StartupError
from ostinato.runtime.execution.device_drafts import DeviceDrafts
from ostinato.runtime.execution.draft_head import HeadRunner
from ostinato.runtime.execution.executor import Executor
from ostinato.runtime.speculation.head_drafter import HeadDrafter
from ostinato.runtime.speculation.model_drafter import ModelDrafter
from ostinato.runtime.speculation.proposer import BatchProposer, Proposer
from ostinato.runtime.startup.bundles import add_kernels
from ostinato.runtime.startup.calibrate import calibrate
from ostinato.runtime.startup.loading import load_tables
from ostinato.runtime.startup.phases import PhaseTimer
from ostinato.runtime.startup.plan.engine_plan import EnginePlan
from ostinato.runtime.startup.rank import build_rank
from ostinato.runtime.startup.rank_parts import DraftSetup, RankParts
from ostinato.runtime.types.step import SchedulerOutput, StepResult

__all__ = ("finish_rank", "make_drafter")

_LOG = logging.getLogger(__name__)

_MOST_HOST_COPIES = 16  # a copy has the block table of a step: megabytes for long contexts


def _log_phase(name: str, seconds: float | None) -> None:
    if seconds is not None:
        _LOG.info("draft model: %s %.2f s", name, seconds)


def make_drafter(
    plan: EnginePlan, target: RankParts, texts: Proposer, monitor: CompileMonitor, undo: ExitStack
) -> BatchProposer:
    """Load the draft model or the head, compile its programs and measure its steps.

    Args:
        plan: the engine's plan.
        target: the rank of the model that is drafted for.
        texts: the drafter from text, whose drafts go first.
        monitor: counts compilations.
        undo: gets the callbacks that release resources if the start fails.

    Raises:
        StartupError: a weight is missing, or the head is for another vocabulary.
    """
    assert plan.draft is not None, "the engine has a draft model"
    # On one GPU drafts stay on the device. Several ranks get them from the host.
    is_queued = not plan.is_cpu and plan.source.shard.num_ranks == 1
    max_drafts = plan.config.speculation.max_drafts
    timer = PhaseTimer(_log_phase)
    own = plan.draft.memory.limited(plan.memory.num_blocks, plan.draft_model_len, 0)
    rank = build_rank(
        dataclasses.replace(plan.draft, memory=own),
        timer,
        monitor,
        undo,
        None,
        draft=DraftSetup(
            recorder=target.recorder,
            attach=lambda network: _attach(plan, network, target.network, timer),
            num_host_copies=_num_host_copies(plan) if is_queued else 1,
        ),
    )
    executor, limits = rank.executor, plan.draft.source.limits
    execute = _reading(executor)
    if is_queued:
        execute = DeviceDrafts(executor, rank.buffers, target.buffers).execute
    units = plan.draft.source.kv_groups[0].units
    block_size = plan.config.cache.block_size * units
    states, head = target.runner.hidden_states, rank.network
    if states is None:
        return ModelDrafter(
            execute,
            block_size=block_size,
            max_drafts=max_drafts,
            max_num_tokens=limits.max_num_batched_tokens,
            max_model_len=own.max_model_len,
            texts=texts,
            units=units,
            costs=finish_rank(rank, executor, timer),
            is_queued=is_queued,
            idle=executor.idle,
            close=executor.close,
        )
    assert isinstance(head, DraftHeadModel), "only a head reads hidden states"
    return HeadDrafter(
        HeadRunner(head, executor, rank.runner, execute, states),
        block_size=block_size,
        max_drafts=max_drafts,
        max_num_tokens=limits.max_num_batched_tokens,
        max_model_len=own.max_model_len,
        texts=texts,
        units=units,
        costs=finish_rank(rank, executor, timer),
        is_queued=is_queued,
    )


def _num_host_copies(plan: EnginePlan) -> int:
    """How many steps of a drafter can be queued at once. When all are queued, the host waits.

    For each step in flight this is one step for each draft token, and one that follows a prompt,
    but at most `_MOST_HOST_COPIES` in all.
    """
    num_in_flight = 2 if plan.overlap else 1
    return min(_MOST_HOST_COPIES, num_in_flight * (1 + plan.config.speculation.max_drafts))


def _reading(executor: Executor) -> Callable[[SchedulerOutput], StepResult]:
    """Runs steps until their tokens are on the host."""
    return lambda output: executor.read(executor.launch(output))


def _attach(
    plan: EnginePlan, network: LanguageModel, model: LanguageModel, timer: PhaseTimer
) -> None:
    """Give a head its model's tables: embedding and output head. A draft model needs nothing.

    Args:
        plan: the plan of the model.
        network: the draft model or the head.
        model: the model that is drafted for.
        timer: times the phases.

    Raises:
        StartupError: a weight is missing, or the head is for another vocabulary.
    """
    if not isinstance(network, DraftHeadModel):
        return
    assert isinstance(model, Decoder), "the plan refuses a head for other models"
    assert plan.draft is not None, "the head has a plan"
    source = plan.draft.source
    tables = None if source.tables is None else load_tables(plan, source.tables, timer)
    most = source.limits.max_num_batched_tokens
    try:
        network.attach(model, most, tables)
    except ValueError as error:
        raise StartupError(
            f"speculation.model={plan.config.speculation.model} cannot be the head: {error}"
        ) from error
    # On a GPU, run each tile of the kernels that a step calls outside of its programs, so that none
    # of them compiles in a later step.
    if not plan.is_cpu:
        width = plan.source.head_inputs.width(plan.source.config.hidden_size)
        hidden = torch.zeros(most, width, dtype=source.dtype, device=source.device)
        for num_tokens in sorted({shape.num_tokens for shape in plan.draft.warm_up_steps}):
            network.read_hidden(hidden[:num_tokens])


def finish_rank(rank: RankParts, executor: Executor, phase: PhaseTimer) -> CostTable | None:
    """Measure step costs, unless an earlier start measured them, and save the bundle.

    Returns:
        The step costs; None if they are not measured.
    """
    plan, costs = rank.plan, rank.costs
    if costs is None and rank.cost_store.is_wanted and plan.source.config.kind.generates:
        with phase("cost table"):
            costs = calibrate(
                rank.cost_store, executor, plan.memory, rank.model, is_cpu=plan.is_cpu
            )
    if rank.bundle is not None:
        with phase("save bundle"):
            if (isa := loaded_isa()) is not None and plan.is_cpu:
                add_kernels(rank.bundle, plan.config, isa)
            rank.bundle.save()
    return costs
