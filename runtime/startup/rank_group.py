"""Starts an engine on several ranks: the work that the ranks do together before the first step.

    share the machine -> plan, agree on the smallest KV cache -> programs -> weights
    -> warm-up, capture

All ranks load their weights at the same time. Rank 0 compiles and saves the programs; the others
load them, because one program serves every rank.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack, closing

from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.models.sharding import shard_of_rank
from ostinato.runtime.directories import ensure_cache
from ostinato.runtime.ranks.messages import StartRank
from ostinato.runtime.ranks.rank_links import RankLinks, close_all, create_links
from ostinato.runtime.ranks.rank_processes import RankProcesses
from ostinato.runtime.startup.phases import PhaseTimer
from ostinato.runtime.startup.plan.device import choose_isa, set_threads
from ostinato.runtime.startup.plan.engine_plan import EnginePlan, make_plan
from ostinato.runtime.startup.rank import Meet, RankParts, build_rank
from ostinato.runtime.types.engine_info import RankInfo

__all__ = ("agree", "build_other_rank", "join")


def join(plan: EnginePlan, ranks: RankProcesses, undo: ExitStack) -> RankLinks:
    """On rank 0: make the links, and send the other ranks what they are built from.

    Args:
        plan: the plan of rank 0.
        ranks: the processes of the other ranks.
        undo: gets the callbacks that release resources if the start fails.

    Raises:
        StartupError: the system has no memory for the links.
        RankFailedError: a rank has ended.
    """
    config, source = plan.config, plan.source
    shape = source.handoff_shape
    own, *others = create_links(config.parallel.tensor, config.parallel.pipeline, shape)
    try:
        links = RankLinks(source.shard, shape, plan.threads, own)
        undo.callback(links.close)
        undo.callback(ranks.close)  # before the links are closed
        max_drafts = source.limits.rows_per_seq - 1
        ranks.start(
            [StartRank(config, rank, max_drafts) for rank in range(1, ranks.size)],
            others,
            hang_limit_s=config.parallel.rank_timeout_s,
            on_failure=links.abort,
        )
    finally:
        close_all(others)
    return links


def build_other_rank(
    start: StartRank, descriptors: list[int], meet: Meet, undo: ExitStack
) -> RankParts:
    """Build a rank after the first, in its own process.

    Args:
        start: from rank 0.
        descriptors: file descriptors of the rank's links to other ranks; this function closes them.
        meet: waits for the other ranks.
        undo: gets the callbacks that release resources if the start fails.

    Raises:
        StartupError: the rank cannot be built; one line that says why.
    """
    config = start.config
    ensure_cache()
    monitor = undo.enter_context(closing(CompileMonitor()))
    threads = set_threads(config.device)
    choose_isa(config.device, is_cpu=True)
    parallel = config.parallel
    shard = shard_of_rank(start.rank, parallel.tensor, parallel.pipeline)
    plan = make_plan(config, threads, max_drafts=start.max_drafts, shard=shard)
    source = plan.source
    links = RankLinks(source.shard, source.handoff_shape, threads, descriptors)
    plan, _ = agree(plan, meet)
    phase = PhaseTimer(lambda name, seconds: None)
    return build_rank(plan, phase, monitor, undo, None, links=links, meet=meet)


def agree(plan: EnginePlan, meet: Meet) -> tuple[EnginePlan, tuple[RankInfo, ...]]:
    """Agree with the other ranks on the number of KV blocks: the least that any rank has room for.

    Args:
        plan: the plan of this rank.
        meet: exchanges numbers with the other ranks.

    Returns:
        The plan with this number of blocks, and the facts of each rank.
    """
    memory = plan.memory
    layers = plan.source.shard.layers(plan.source.config.num_layers)
    rows = meet(
        "plan",
        [
            *(memory.num_blocks, memory.max_model_len, os.getpid(), plan.threads),
            *(memory.weights_bytes, memory.activation_bytes, memory.bytes_per_block),
            *(layers.start, layers.size),
        ],
    )
    num_blocks, max_model_len = min(row[0] for row in rows), min(row[1] for row in rows)
    infos = tuple(
        RankInfo(
            rank=rank,
            pid=row[2],
            threads=row[3],
            weights_bytes=row[4],
            memory_bytes=row[4] + row[5] + num_blocks * row[6],
            first_layer=row[7],
            num_layers=row[8],
        )
        for rank, row in enumerate(rows)
    )
    return dataclasses.replace(plan, memory=memory.limited(num_blocks, max_model_len)), infos
