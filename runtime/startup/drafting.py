"""Builds a drafter that has weights: a draft model, or a draft head (EAGLE-3, MTP)."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.models.decoder import Decoder
from ostinato.models.draft_heads.draft_head_model import DraftHeadModel
from ostinato.ops.native.library import loaded_isa
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.errors import StartupError
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
from ostinato.runtime.startup.rank import RankParts, build_rank

__all__ = ("finish_rank", "make_drafter")

_LOG = logging.getLogger(__name__)


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
    timer = PhaseTimer(lambda name, seconds: _LOG.info("draft model: %s %.2f s", name, seconds))
    rank = build_rank(plan.draft, timer, monitor, undo, None, has_grammars=False)
    executor, limits = rank.executor, plan.draft.source.limits
    block_size, max_drafts = plan.config.cache.block_size, plan.config.speculation.max_drafts
    max_model_len = plan.draft.memory.max_model_len
    if target.runner.hidden_states is None:
        return ModelDrafter(
            lambda output: executor.read(executor.launch(output)),
            block_size=block_size,
            max_drafts=max_drafts,
            max_num_tokens=limits.max_num_batched_tokens,
            max_model_len=max_model_len,
            texts=texts,
            costs=finish_rank(rank, executor, timer),
            idle=executor.idle,
            close=executor.close,
        )
    head, model = rank.network, target.network
    assert isinstance(head, DraftHeadModel), "only a head reads hidden states"
    assert isinstance(model, Decoder), "the plan refuses a head for other models"
    copied = plan.draft.source.tables
    tables = None if copied is None else load_tables(plan, copied, timer)
    try:
        head.attach(model, limits.max_num_batched_tokens, tables)
    except ValueError as error:
        raise StartupError(
            f"speculation.model={plan.config.speculation.model} cannot be the head: {error}"
        ) from error
    return HeadDrafter(
        HeadRunner(head, executor, rank.runner, target.runner.hidden_states),
        block_size=block_size,
        max_drafts=max_drafts,
        max_num_tokens=limits.max_num_batched_tokens,
        max_model_len=max_model_len,
        texts=texts,
        costs=finish_rank(rank, executor, timer),
    )


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
                add_kernels(rank.bundle, plan.config.model, isa)
            rank.bundle.save()
    return costs
