"""Starts an engine on several ranks: the work that the ranks do together before the first step.

    share the machine -> plan, agree on the smallest KV cache -> programs -> weights
    -> warm-up, capture

All ranks load their weights at the same time. Rank 0 compiles and saves the programs. The other
ranks of its machine load these programs, because one program serves every rank. On each further
machine, the first rank there compiles and saves the programs for that machine.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import ExitStack, closing

from ostinato.conf.schema import DeviceName
from ostinato.conf.sections.server_schema import ParallelConfig
from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.models.sharding import shard_of_rank
from ostinato.runtime.directories import ensure_cache
from ostinato.runtime.errors import StartupError
from ostinato.runtime.ranks.link_ends import RankLayout, close_all, create_links
from ostinato.runtime.ranks.messages import StartRank
from ostinato.runtime.ranks.rank_links import RankLinks
from ostinato.runtime.ranks.rank_processes import RankProcesses
from ostinato.runtime.secure_connection import reached_at
from ostinato.runtime.startup.phases import PhaseTimer
from ostinato.runtime.startup.plan.device import choose_gpu, choose_isa, set_threads
from ostinato.runtime.startup.plan.engine_plan import EnginePlan, make_plan
from ostinato.runtime.startup.rank import build_rank
from ostinato.runtime.startup.rank_parts import Meet, Peers, RankParts
from ostinato.runtime.types.engine_info import RankInfo

__all__ = ("agree", "build_other_rank", "join", "layout_of", "peers_of")

_LOG = logging.getLogger(__name__)


def join(plan: EnginePlan, ranks: RankProcesses, undo: ExitStack) -> RankLinks:
    """On rank 0: make the links, and send the other ranks their links and `StartRank`.

    Args:
        plan: the plan of rank 0.
        ranks: the processes of the other ranks.
        undo: gets the callbacks that release resources if the start fails.

    Raises:
        OSError: the system has no memory or no descriptors for the links.
        StartupError: a link cannot be opened.
        RankFailedError: a rank has ended.
    """
    config, source = plan.config, plan.source
    shape = source.handoff_shape
    layout = layout_of(config.parallel)
    exchange = source.exchange
    if exchange.is_distributed and layout.has_spread_groups:
        _LOG.warning(
            "the ranks of this engine exchange values between machines by %s, which does not "
            "encrypt them: the machines need a network that no others use",
            exchange.value,
        )
    made = create_links(layout, 0, shape.slot_bytes, exchange)
    try:
        links = _open_links(plan, made.ranks[0])
    except StartupError:
        close_all([*made.ranks[1:], made.relay.descriptors()])
        raise
    undo.callback(links.close)
    undo.callback(ranks.close)  # before the links are closed
    # The other machines must use the same kind of device as this one.
    device = dataclasses.replace(config.device, name=DeviceName(source.device.type))
    config = dataclasses.replace(config, device=device)
    max_drafts = source.limits.rows_per_seq - 1
    ranks.start(
        [StartRank(config, rank, max_drafts, source.head_inputs) for rank in range(1, ranks.size)],
        made,
        hang_limit_s=config.parallel.rank_timeout_s,
        on_failure=links.abort,
    )
    return links


def _open_links(plan: EnginePlan, descriptors: list[int]) -> RankLinks:
    """The links of a rank, from its descriptors.

    Raises:
        StartupError: a link cannot be opened.
    """
    parallel, source = plan.config.parallel, plan.source
    layout, shape = layout_of(parallel), source.handoff_shape
    host = reached_at(parallel.host) if layout.machines > 1 else "127.0.0.1"
    return RankLinks(layout, source.shard, shape, plan.threads, descriptors, source.exchange, host)


def layout_of(parallel: ParallelConfig) -> RankLayout:
    """Which ranks an engine has, and on which machines."""
    return RankLayout(parallel.tensor, parallel.pipeline, parallel.machines_per_engine)


def peers_of(parallel: ParallelConfig, rank: int, links: RankLinks, meet: Meet) -> Peers:
    """The other ranks. Rank 0 makes the programs, then the first rank of each other machine."""
    layout = layout_of(parallel)
    num_turns = min(layout.machines, 2)
    is_first = rank == layout.ranks_of(layout.machine_of(rank))[0]
    turn = min(rank, 1) if is_first else num_turns
    return Peers(links=links, meet=meet, turn=turn, num_turns=num_turns)


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
        StartupError: the rank cannot be built; the message is one line.
    """
    config = start.config
    ensure_cache()
    monitor = undo.enter_context(closing(CompileMonitor()))
    threads = set_threads(config.device)
    choose_gpu(config, start.rank)
    parallel = config.parallel
    shard = shard_of_rank(start.rank, parallel.tensor, parallel.pipeline)
    plan = make_plan(
        config,
        threads,
        max_drafts=start.max_drafts,
        shard=shard,
        head_inputs=start.head_inputs,
    )
    choose_isa(config.device, is_cpu=plan.is_cpu)
    links = _open_links(plan, descriptors)
    undo.callback(links.close)  # the model does not close them
    plan, _ = agree(plan, meet)
    phase = PhaseTimer(lambda name, seconds: None)
    peers = peers_of(parallel, start.rank, links, meet)
    return build_rank(plan, phase, monitor, undo, None, peers)


def agree(plan: EnginePlan, meet: Meet) -> tuple[EnginePlan, tuple[RankInfo, ...]]:
    """Agree with the other ranks on the numbers of KV blocks and states and the longest sequence.

    Each is the least of all ranks, so every rank has room for it.

    Args:
        plan: the plan of this rank.
        meet: exchanges numbers with the other ranks.

    Returns:
        The plan with these numbers, and the facts of each rank.
    """
    memory = plan.memory
    layers = plan.source.shard.layers(plan.source.config.num_layers)
    rows = meet(
        "plan",
        [
            *(*memory.shares, os.getpid(), plan.threads),
            *(memory.weights_bytes, memory.activation_bytes + memory.tier_bytes),
            *(memory.bytes_per_block, memory.bytes_per_state),
            *(layers.start, layers.size),
        ],
    )
    layout = layout_of(plan.config.parallel)
    num_blocks, max_model_len, num_states = (min(row[at] for row in rows) for at in range(3))
    infos = tuple(
        RankInfo(
            rank=rank,
            machine=layout.machine_of(rank),
            pid=row[3],
            threads=row[4],
            weights_bytes=row[5],
            memory_bytes=row[5] + row[6] + num_blocks * row[7] + num_states * row[8],
            first_layer=row[9],
            num_layers=row[10],
        )
        for rank, row in enumerate(rows)
    )
    memory = memory.limited(num_blocks, max_model_len, num_states)
    plan = dataclasses.replace(plan, memory=memory)
    if (draft := plan.draft) is not None:  # its cache has the same blocks
        longest = min(max_model_len, draft.memory.max_model_len)
        limited = draft.memory.limited(num_blocks, longest, 0)
        plan = dataclasses.replace(plan, draft=dataclasses.replace(draft, memory=limited))
    return plan, infos
