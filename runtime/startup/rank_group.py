"""Starts an engine on several ranks: what rank 0 and the others do together before the first step.

    share the machine -> plan, agree on the smallest -> programs -> weights -> warm-up, capture

All ranks load their weights at the same time. Rank 0 compiles and saves the programs; the others
load them, because one program serves every rank.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack, closing

from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.models.sharding import Shard
from ostinato.ops.parallel.group import ParallelGroup, create_segment
from ostinato.runtime.directories import ensure_cache
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import available_cores
from ostinato.runtime.ranks.messages import StartRank
from ostinato.runtime.ranks.rank_processes import RankProcesses
from ostinato.runtime.startup.device import choose_isa, set_threads
from ostinato.runtime.startup.engine_plan import EnginePlan, make_plan
from ostinato.runtime.startup.phases import PhaseTimer
from ostinato.runtime.startup.rank import Meet, RankParts, build_rank
from ostinato.runtime.types.engine_info import RankInfo

__all__ = ("agree", "build_other_rank", "join")

# The processes are watched, so that no wait needs a limit. This one ends a wait that the watch
# does not recognise, after a time that no step takes.
_LONGEST_WAIT_S = 1800.0


def join(plan: EnginePlan, ranks: RankProcesses, undo: ExitStack) -> ParallelGroup:
    """Rank 0's part: make the group, and send the other ranks what they are built from.

    Args:
        plan: of rank 0.
        ranks: the processes of the others.
        undo: gets the callbacks that release resources if the start fails.

    Raises:
        StartupError: the system has no memory for the group.
        RankFailedError: a rank has ended.
    """
    size, config = ranks.size, plan.config
    segment = create_segment(size)
    try:
        group = _open(segment, 0, size, plan.threads)
        undo.callback(group.close)
        undo.callback(ranks.close)  # before the group is closed
        max_drafts = plan.source.limits.rows_per_seq - 1
        ranks.start(
            [StartRank(config, rank, size, max_drafts) for rank in range(1, size)],
            segment,
            hang_limit_s=config.parallel.rank_timeout_s,
            on_failure=group.abort,
        )
    finally:
        os.close(segment)
    return group


def build_other_rank(start: StartRank, segment: int, meet: Meet, undo: ExitStack) -> RankParts:
    """Build a rank after the first, in its own process.

    Args:
        start: from rank 0.
        segment: descriptor of the group's memory; closed.
        meet: waits for the other ranks.
        undo: gets the callbacks that release resources if the start fails.

    Raises:
        StartupError: the rank can not be built; one line that says why.
    """
    config = start.config
    ensure_cache()
    monitor = undo.enter_context(closing(CompileMonitor()))
    threads = set_threads(config.device)
    choose_isa(config.device, is_cpu=True)
    shard = Shard(start.rank, start.size)
    plan = make_plan(config, threads, max_drafts=start.max_drafts, shard=shard)
    group = _open(segment, start.rank, start.size, threads)
    os.close(segment)
    plan, _ = agree(plan, meet)
    phase = PhaseTimer(lambda name, seconds: None)
    return build_rank(plan, phase, monitor, undo, None, group=group, meet=meet)


def agree(plan: EnginePlan, meet: Meet) -> tuple[EnginePlan, tuple[RankInfo, ...]]:
    """The plan with the fewest KV blocks that a rank has room for, and what each rank takes.

    Args:
        plan: of this rank.
        meet: exchanges numbers with the other ranks.
    """
    memory = plan.memory
    rows = meet(
        "plan",
        [
            *(memory.num_blocks, memory.max_model_len, os.getpid(), plan.threads),
            *(memory.weights_bytes, memory.activation_bytes, memory.bytes_per_block),
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
        )
        for rank, row in enumerate(rows)
    )
    memory = dataclasses.replace(
        memory,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * memory.bytes_per_block,
        max_model_len=max_model_len,
    )
    return dataclasses.replace(plan, memory=memory), infos


def _open(segment: int, rank: int, size: int, threads: int) -> ParallelGroup:
    # A waiting rank must not take the processor of a rank that it waits for.
    spin_us = 50 if size * threads <= available_cores() else 0
    try:
        return ParallelGroup(segment, rank, size, spin_us=spin_us, timeout_s=_LONGEST_WAIT_S)
    except (RuntimeError, ValueError, OSError) as error:
        raise StartupError(f"rank {rank} can not join the others: {error}") from error
