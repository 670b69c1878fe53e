"""Builds an engine from a configuration. It connects the parts of rank 0, the leader.

    plan -> rank (rank.py) -> step costs -> scheduler -> engine

A mistake in the configuration or the environment is reported as a `StartupError` of one line.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack

import msgspec

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.errors import first_line
from ostinato.conf.schema import InstructionSetName, LoadFormat
from ostinato.conf.sections.speculation_schema import NO_DRAFTS, SpeculationMethod
from ostinato.graphs.bundle import Bundle
from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.graphs.recorder import is_out_of_memory
from ostinato.models.sharding import shard_of_rank
from ostinato.ops.native.library import core_library, loaded_isa
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.directories import ensure_cache
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.engine.step_observer import StepObserver
from ostinato.runtime.engine.tier_copies import TierCopies
from ostinato.runtime.errors import RankFailedError, StartupError
from ostinato.runtime.execution.executor import Executor
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.kv.load_costs import LoadCosts
from ostinato.runtime.kv.tier_index import TierIndex
from ostinato.runtime.memory.memory_plan import GIB
from ostinato.runtime.ranks.messages import Serve
from ostinato.runtime.ranks.processes_executor import ProcessesExecutor
from ostinato.runtime.ranks.rank_processes import RankProcesses
from ostinato.runtime.ranks.rank_share import share_of_rank
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.speculation.proposer import Proposer
from ostinato.runtime.speculation.text_drafter import TextDrafter
from ostinato.runtime.startup.calibrate import make_scheduler
from ostinato.runtime.startup.drafting import finish_rank, make_drafter
from ostinato.runtime.startup.isa_trial import build_levels, try_levels
from ostinato.runtime.startup.model_cache import LoadedModelCache
from ostinato.runtime.startup.phases import PhaseTimer, Report
from ostinato.runtime.startup.plan.device import (
    choose_gpu,
    choose_isa,
    resolve_device,
    set_threads,
)
from ostinato.runtime.startup.plan.engine_plan import EnginePlan, make_plan
from ostinato.runtime.startup.plan.identity import block_identity, identifying_files
from ostinato.runtime.startup.rank import build_rank
from ostinato.runtime.startup.rank_group import agree, join, layout_of, peers_of
from ostinato.runtime.startup.rank_parts import RankParts
from ostinato.runtime.startup.served_model import describe_float_head
from ostinato.runtime.tiers.tier_calls import num_buffers
from ostinato.runtime.tiers.tier_opening import TierOpening
from ostinato.runtime.tiers.weights_digest import FileState, states_of
from ostinato.runtime.types.engine_info import IsaTrial

__all__ = ("build_engine", "compile_bundle")

_LOG = logging.getLogger(__name__)

# How long the start waits for the directory of copies of KV blocks, if no weights have to be read.
_OPENING_S = 1.0
# The longest step of an encoder on a CPU, in seconds. A new text waits for the rest of the running
# step, and then for its own step.
_TEXT_STEP_S = 0.03


def build_engine(
    config: EngineConfig,
    report: Report = lambda name, seconds: None,
    observer: StepObserver | None = None,
    model_cache: LoadedModelCache | None = None,
    proposer: Proposer | None = None,
    ranks: RankProcesses | None = None,
) -> Engine:
    """Build an engine. Everything that it needs is compiled when this returns.

    Args:
        config: the engine's configuration; each component gets its section.
        report: called at the beginning and at the end of each phase of the start.
        observer: called with every step; None = a default observer that writes no file.
        model_cache: keeps the loaded model for later engines; None = load the model.
        proposer: the drafter; None = as configured.
        ranks: the processes of the other ranks, if they have been started. They are ended if the
            engine cannot start. None = they are started here, if the configuration asks for ranks.

    Raises:
        StartupError: the engine cannot start as configured; one line with the remedy.
    """
    if proposer is not None and config.parallel.pipeline > 1:
        raise StartupError(
            "LLM(proposer=...) needs a model in one stage, and parallel.pipeline="
            f"{config.parallel.pipeline} divides it; leave the proposer out, or set "
            "parallel.pipeline=1"
        )
    return _build(config, report, observer, model_cache, proposer, ranks)[0]


def compile_bundle(config: EngineConfig, report: Report) -> Bundle | None:
    """Build an engine, save the bundle of its compiled programs, and close the engine.

    Args:
        config: the engine's configuration.
        report: called at the beginning and at the end of each phase of the start.

    Returns:
        The bundle; None if the configuration saves none.

    Raises:
        StartupError: the engine cannot start as configured; one line with the remedy.
    """
    engine, bundle = _build(config, report, None, None, None, None, compiles_levels=True)
    engine.close()
    return bundle


def _build(
    config: EngineConfig,
    report: Report,
    observer: StepObserver | None,
    model_cache: LoadedModelCache | None,
    proposer: Proposer | None,
    ranks: RankProcesses | None,
    *,
    compiles_levels: bool = False,
) -> tuple[Engine, Bundle | None]:
    phase = PhaseTimer(report)
    has_method = config.speculation.method is not None
    if proposer is not None and config.speculation.uses_model:
        config = dataclasses.replace(config, speculation=NO_DRAFTS)
    elif not has_method and (proposer is not None or config.model.load_format is LoadFormat.dummy):
        # Either the caller's proposer is the drafter, or the weights are random. Outputs of random
        # weights repeat themselves: drafts would gain more than they do with a trained model.
        section = dataclasses.replace(config.speculation, method=SpeculationMethod.none)
        config = dataclasses.replace(config, speculation=section)
    ensure_cache()
    try:
        with ExitStack() as undo:
            monitor = CompileMonitor()
            undo.callback(monitor.close)
            parallel = config.parallel
            if parallel.num_ranks > 1:
                if ranks is None and parallel.machines_per_engine > 1:
                    raise StartupError(
                        f"parallel.nodes={parallel.nodes} needs a server that the other machines "
                        "can join; use run serve, or set parallel.nodes=1"
                    )
                ranks = ranks or RankProcesses(layout_of(parallel))
                undo.callback(ranks.close)
                choose_gpu(config, 0)
                on_gpu = resolve_device(config.device.name).type != "cpu"
                config = share_of_rank(config, on_gpu=on_gpu)
                model_cache = None  # a loaded model belongs to its group of ranks
            threads = set_threads(config.device)
            with phase("open"):
                max_drafts = None if proposer is None else proposer.max_drafts
                shard = shard_of_rank(0, parallel.tensor, parallel.pipeline)
                plan = make_plan(config, threads, max_drafts=max_drafts, shard=shard)
                plan = _with_trial(plan, compiles_levels=compiles_levels)
                has_disk = bool(config.cache.disk_dir)
                states = states_of(identifying_files(plan)) if has_disk else []
            if proposer is None and plan.config.speculation.max_drafts:
                proposer = TextDrafter(plan.config.speculation)
            choose_isa(plan.config.device, is_cpu=plan.is_cpu)
            if ranks is None:
                rank = build_rank(plan, phase, monitor, undo, model_cache)
                costs = finish_rank(rank, rank.executor, phase)
                proposer = _with_draft_model(rank, proposer, phase, monitor, undo)
                engine = _lead(rank, rank.executor, costs, observer, proposer, states)
            else:
                with ranks.explained():
                    rank, executor = _build_first_rank(plan, ranks, phase, monitor, undo)
                    costs = finish_rank(rank, executor, phase)
                    proposer = _with_draft_model(rank, proposer, phase, monitor, undo)
                    engine = _lead(rank, executor, costs, observer, proposer, states)
                    ranks.send(Serve())
            monitor.mark_ready()
            rank.executor.idle()  # the start is over: the cache's next pages are mapped
            undo.pop_all()
            return engine, rank.bundle
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(
            f"the device ran out of memory while the engine was built ({first_line(error)}); set "
            "cache.memory_gib, lower device.memory_fraction or use graphs.mode=compiled"
        ) from error
    except RankFailedError as error:
        raise StartupError(str(error)) from error
    except OSError as error:  # the system refused a file, a process or a lock
        _LOG.debug("the engine was not built", exc_info=True)
        raise StartupError(f"the engine cannot start: {error}") from error


def _with_draft_model(
    rank: RankParts,
    proposer: Proposer | None,
    phase: PhaseTimer,
    monitor: CompileMonitor,
    undo: ExitStack,
) -> Proposer | None:
    """`proposer`; or if the plan has a draft model or a head, the drafter that uses it."""
    if rank.plan.draft is None:
        return proposer
    assert proposer is not None, "predicted outputs have a drafter"
    with phase("draft model"):
        return make_drafter(rank.plan, rank, proposer, monitor, undo)


def _with_trial(plan: EnginePlan, *, compiles_levels: bool) -> EnginePlan:
    """The plan with the fastest instruction set, if several were timed."""
    if compiles_levels:
        build_levels(plan.config, plan.source)
    trial = try_levels(plan.config, plan.source, anew=compiles_levels)
    if trial is None or not trial.microseconds:
        return plan
    return _with_isa(plan, InstructionSetName(trial.isa), trial)


def _with_isa(plan: EnginePlan, isa: InstructionSetName, trial: IsaTrial) -> EnginePlan:
    device = dataclasses.replace(plan.config.device, isa=isa)
    config = dataclasses.replace(plan.config, device=device)
    draft = None if plan.draft is None else _with_isa(plan.draft, isa, trial)
    return dataclasses.replace(plan, config=config, isa_trial=trial, draft=draft)


def _build_first_rank(
    plan: EnginePlan,
    ranks: RankProcesses,
    phase: PhaseTimer,
    monitor: CompileMonitor,
    undo: ExitStack,
) -> tuple[RankParts, Executor]:
    """Build the first rank in this process, while the other ranks build theirs."""
    parallel = plan.config.parallel
    has_isa = not plan.is_cpu or plan.config.device.isa is not InstructionSetName.auto
    if parallel.machines_per_engine > 1 and not has_isa:
        core_library()  # loads the kernels: the other machines must run the same instruction set
        isa = InstructionSetName(loaded_isa() or "auto")
        device = dataclasses.replace(plan.config.device, isa=isa)
        plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, device=device))
    links = join(plan, ranks, undo)
    with phase("plan"):
        plan, infos = agree(plan, ranks.meet)
    peers = peers_of(parallel, 0, links, ranks.meet)
    rank = build_rank(plan, phase, monitor, undo, None, peers)
    rank = dataclasses.replace(rank, model=msgspec.structs.replace(rank.model, ranks=infos))
    num_stages = plan.source.shard.stage.count
    return rank, ProcessesExecutor(rank.executor, rank.runner, ranks, links, num_stages)


def _lead(
    rank: RankParts,
    executor: Executor,
    costs: CostTable | None,
    observer: StepObserver | None,
    proposer: Proposer | None,
    states: list[FileState],
) -> Engine:
    """Make the scheduler and the engine.

    `states` are those of the files that name the directory of copies on disk, from before they were
    loaded.
    """
    plan = rank.plan
    if reason := plan.why_batch_dependent:
        level = logging.WARNING if plan.is_cpu else logging.INFO  # on a GPU no setting helps
        _LOG.log(level, "a seed may give other tokens in another batch: %s", reason)
    if plan.source.weights.has_cache_scales and not plan.source.has_cache_scales:
        _LOG.info(
            "the checkpoint's scales of keys and values are not used: cache.dtype=%s needs none",
            plan.config.cache.dtype,
        )
    if text := describe_float_head(plan, rank.network):
        _LOG.info("%s", text)
    cache, scheduler = _make_scheduler(plan, costs, executor, proposer)
    copies = None
    if cache.tiers is not None:
        copies = _make_tier_copies(plan, executor, scheduler, cache.tiers, states)
    return Engine(
        scheduler,
        cache,
        executor,
        rank.model,
        cost_table=costs,
        observer=observer,
        num_adapter_slots=plan.config.lora.num_slots,
        copies=copies,
    )


def _make_scheduler(
    plan: EnginePlan, costs: CostTable | None, executor: Executor, proposer: Proposer | None
) -> tuple[KVCacheManager, Scheduler]:
    """The KV cache manager and the scheduler."""
    config, kind = plan.config, plan.source.config.kind
    cache = KVCacheManager(
        plan.memory.num_blocks,
        config.cache.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching and kind.needs_kv_cache,
        tiers=_make_tier_index(plan, costs) if config.cache.has_tiers else None,
        groups=plan.source.kv_groups,
        step_tokens=plan.source.limits.max_num_batched_tokens,
        num_states=plan.memory.num_states,
    )
    scheduler = make_scheduler(
        config.scheduler,
        cache,
        plan.memory.max_model_len,
        plan.limits,
        costs,
        whole_prompts=kind.takes_whole_prompts,
        max_in_flight=executor.max_in_flight,
        has_lanes=executor.has_lanes,
        proposer=proposer,
        adaptive_drafts=config.speculation.adaptive,
        text_step_s=_TEXT_STEP_S if kind.takes_whole_prompts and plan.is_cpu else None,
    )
    return cache, scheduler


def _make_tier_index(plan: EnginePlan, costs: CostTable | None) -> TierIndex:
    """The index of the KV cache's slower tiers."""
    cache, block_bytes = plan.config.cache, plan.kv_cache_spec.bytes_per_block
    return TierIndex(
        block_bytes=block_bytes,
        costs=LoadCosts(costs, block_bytes, cache.block_size),
        num_host_places=plan.num_host_places,
        expects_disk=bool(cache.disk_dir),
        policy=cache.store,
        stores_salted=cache.store_salted,
    )


def _make_tier_copies(
    plan: EnginePlan,
    executor: Executor,
    scheduler: Scheduler,
    index: TierIndex,
    states: list[FileState],
) -> TierCopies:
    """The engine's part of the slower tiers.

    The directory of the disk is opened now, or later if weights have to be read for it.
    """
    cache, opening = plan.config.cache, None
    if cache.disk_dir:
        opening = TierOpening(
            cache.disk_dir,
            block_identity(plan),
            identifying_files(plan),
            int(cache.disk_gib * GIB),
            states,
        )
        opening.wait_if_short(_OPENING_S)
    copies = TierCopies(
        executor,
        scheduler,
        index,
        opening,
        num_disk_places=plan.num_disk_places,
        num_buffers=num_buffers(plan.kv_cache_spec.bytes_per_block),
    )
    copies.advance(waits=False)
    return copies
