"""Builds the parts that every rank of an engine has: model, KV cache, programs and executor.

    weights | compile -> cache -> warm-up -> capture

One thread loads the weights while the main thread traces and compiles. Only the leader, rank 0, has
a scheduler and measures step costs (build_engine.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from ostinato.conf.schema import GraphMode
from ostinato.graphs.buckets import GraphKey, name_buckets, why_incomplete
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.bundle import Bundle
from ostinato.graphs.capture import GraphRunner
from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.graphs.compiler.compile import Binder
from ostinato.graphs.recorder import CpuRecorder, CudaRecorder, is_out_of_memory
from ostinato.graphs.sampling_graph import DividedSampler, GraphSampler
from ostinato.graphs.threads import StepThreads
from ostinato.graphs.timing import make_timer
from ostinato.models.base import EncoderModel, LanguageModel
from ostinato.models.kv_cache import KVCache
from ostinato.ops.attention import AttentionPlanner, PlannedBackend, PlannedTable, load_backend
from ostinato.runtime.errors import StartupError
from ostinato.runtime.execution.encoding.make_encoder_parts import EncoderParts, make_encoder_parts
from ostinato.runtime.execution.hidden_state_pool import HiddenStatePool, num_pool_slots
from ostinato.runtime.execution.hidden_states import HiddenStates, KeptStates
from ostinato.runtime.execution.inline_executor import InlineExecutor
from ostinato.runtime.execution.model_runner import ModelRunner
from ostinato.runtime.execution.pooler import Pooler
from ostinato.runtime.grammar.store import GrammarStore
from ostinato.runtime.kv.page_mapper import CachePages, map_ahead
from ostinato.runtime.memory.measured_memory import CudaMemory, compare_with_plan
from ostinato.runtime.sampling.sampler import Sampler
from ostinato.runtime.startup.calibrate import CostStore
from ostinato.runtime.startup.loading import begin_model, open_bundle
from ostinato.runtime.startup.model_cache import LoadedModelCache
from ostinato.runtime.startup.phases import PhaseTimer
from ostinato.runtime.startup.plan.engine_plan import EnginePlan
from ostinato.runtime.startup.plan.planning import bucket_table, plan_measured
from ostinato.runtime.startup.rank_parts import DraftSetup, Meet, Peers, RankParts
from ostinato.runtime.startup.served_model import (
    describe_kernels,
    describe_model,
    tokenizer_and_ends,
)

__all__ = ("build_rank",)

_LOG = logging.getLogger(__name__)

_ALONE = Peers(links=None, meet=lambda name, numbers: [numbers], turn=0, num_turns=1)


def build_rank(
    plan: EnginePlan,
    phase: PhaseTimer,
    monitor: CompileMonitor,
    undo: ExitStack,
    model_cache: LoadedModelCache | None,
    peers: Peers = _ALONE,
    draft: DraftSetup | None = None,
) -> RankParts:
    """Load the model, compile and capture its programs.

    Args:
        plan: from `make_plan`.
        phase: times the phases.
        monitor: counts compilations; closed with the executor.
        undo: gets the callbacks that release resources if the start fails.
        model_cache: keeps the loaded model for later engines; None = load the model.
        peers: the ranks that compute the model together; by default, this one alone.
        draft: set for the model of a drafter, whose requests have no grammars.

    Raises:
        StartupError: the weights cannot be loaded, or do not fit into the memory.
    """
    config, source = plan.config, plan.source
    name = "" if draft is None else "draft model: "  # in the log
    grammars = _make_grammars(plan, undo)
    with torch.inference_mode(), ThreadPoolExecutor(1, "load") as loader:
        model, finish = begin_model(plan, loader, phase, model_cache)
        if draft is None and source.shard.is_leader and source.config.kind.generates:
            # After the weights: this holds the interpreter's lock, and their kernels do not.
            grammars.begin_loading()
        aux = plan.make_aux_states()
        if peers.links is not None:
            peers.meet("links", [])
            peers.links.connect(peers.meet)
            peers.links.join(model, aux)
        num_copies = 1 if draft is None else draft.num_host_copies
        buffers = _make_buffers(plan, model, num_copies)
        planner = _make_planner(plan, buffers, undo)
        cuda_recorder, token_sampler = _make_cuda_recorder(plan, draft, num_copies)
        if cuda_recorder is not None and draft is None:
            with phase("measure"):
                plan = _with_measured_memory(plan, model, buffers, planner, token_sampler)
            plan = _with_fewest_blocks(plan, peers.meet)
        kv_cache = plan.allocate_cache()
        pages = map_ahead(kv_cache, plan.kv_cache_spec)
        if pages is not None:
            undo.callback(pages.close)
        bundle, bind = _open_programs(plan, undo, peers, lambda one: finish(kv_cache, buffers, one))
        if peers.links is not None:
            peers.links.join(model, aux)  # on a GPU this model was traced, in a group of its own
        num_stages = source.shard.stage.count
        cost_store = CostStore(config.graphs, source.limits, plan.threads, num_stages, bundle)
        costs = cost_store.load()
        program = None if bind is None else bind(model)
        graphs = GraphRunner(
            model,
            kv_cache,
            buffers,
            program=program,
            table=plan.buckets if costs is None else bucket_table(config, source, costs),
            recorder=cuda_recorder or CpuRecorder(program),
            planner=planner,
            timer=make_timer(source.device),
            aux=aux,
            border=peers.links,
        )
        peers.meet("weights", [])
        if draft is not None:
            draft.attach(model)
        memory = None if cuda_recorder is None else CudaMemory()
        _prepare_graphs(plan, graphs, token_sampler, memory, phase, name)
        _LOG.info("%slayers: %s", name, _count_layers(graphs))
        if kernels := describe_kernels(plan):
            _LOG.info("CPU kernels: %s", kernels)
        encoding = make_encoder_parts(model, buffers, source.images, source.sounds)
        runner = _make_runner(plan, model, graphs, buffers, token_sampler, grammars, encoding)
        parts = runner, kv_cache, grammars, monitor
        executor = _make_executor(plan, model, *parts, pages, encoding, undo)
    with phase("grammar vocabulary"):
        grammars.wait_until_loaded()
    return RankParts(
        plan=plan,
        network=model,
        executor=executor,
        runner=runner,
        buffers=buffers,
        recorder=cuda_recorder,
        monitor=monitor,
        model=describe_model(plan, phase.seconds),
        bundle=bundle,
        cost_store=cost_store,
        costs=costs,
    )


def _with_measured_memory(
    plan: EnginePlan,
    model: LanguageModel,
    buffers: StaticBuffers,
    planner: AttentionPlanner | None,
    token_sampler: GraphSampler | None,
) -> EnginePlan:
    """The plan with the measured memory of a CUDA device."""
    memory = plan_measured(
        plan.config,
        plan.source,
        plan.memory,
        plan.buckets,
        model,
        buffers,
        planner,
        token_sampler,
    )
    return dataclasses.replace(plan, memory=memory)


def _with_fewest_blocks(plan: EnginePlan, meet: Meet) -> EnginePlan:
    """The plan with the KV cache that every rank has room for after measuring its GPU."""
    memory = plan.memory
    rows = meet("memory", list(memory.shares))
    return dataclasses.replace(plan, memory=memory.limited(*map(min, zip(*rows, strict=True))))


def _open_programs(
    plan: EnginePlan,
    undo: ExitStack,
    peers: Peers,
    finish: Callable[[Bundle | None], Binder | None],
) -> tuple[Bundle | None, Binder | None]:
    """Compile or load the programs, and wait for the weights."""
    meetings = [f"programs {number}" for number in range(peers.num_turns)]
    for name in meetings[: peers.turn]:
        peers.meet(name, [])
    bundle = open_bundle(plan)
    if peers.turn == peers.num_turns:
        return bundle, finish(bundle)
    if bundle is not None:
        undo.callback(bundle.end_turn)
        bundle.take_turn()
    own, *later = meetings[peers.turn :]
    is_complete = bundle is None or bool(bundle.entries)
    if is_complete:
        peers.meet(own, [])
    bind = finish(bundle)
    if not is_complete:
        if bundle is not None and plan.source.shard.num_ranks > 1:
            bundle.save()
        peers.meet(own, [])
    for name in later:
        peers.meet(name, [])
    return bundle, bind


def _make_grammars(plan: EnginePlan, undo: ExitStack) -> GrammarStore:
    tokenizer, eos_token_ids = tokenizer_and_ends(plan)
    grammars = GrammarStore(tokenizer, plan.source.config.vocab_size, eos_token_ids)
    undo.callback(grammars.close)
    return grammars


def _make_buffers(plan: EnginePlan, model: LanguageModel, num_copies: int) -> StaticBuffers:
    limits, block_size = plan.source.limits, plan.config.cache.block_size
    groups, length = plan.source.kv_groups, plan.memory.max_model_len
    num_blocks = [-(-length // (group.units * block_size)) for group in groups]
    return StaticBuffers(
        max_num_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_num_rows=limits.max_num_rows,
        max_blocks_per_seq=num_blocks[0],
        block_size=block_size,
        device=plan.source.device,
        async_tokens=plan.overlap or None,
        table=model.step_tensors,
        max_drafts=limits.rows_per_seq - 1,
        num_host_copies=num_copies,
        has_adapters=plan.source.adapters is not None,
        groups=groups,
        max_window_blocks_per_seq=num_blocks[1] if len(groups) > 1 else 0,
        has_states=plan.source.config.recurrent is not None,
    )


def _make_planner(
    plan: EnginePlan, buffers: StaticBuffers, undo: ExitStack
) -> AttentionPlanner | None:
    """The planner of an attention backend that plans steps on the host; None for other backends."""
    if not plan.backend:
        return None
    planned = load_backend(plan.backend)
    if not isinstance(planned, PlannedBackend):
        return None
    tables = buffers.host.block_table, buffers.host.window_block_table
    planner = planned.make_planner(
        plan.attention_spec,
        plan.buckets.keys,
        tables=[
            PlannedTable(group.units * buffers.block_size, table.shape[1], group.window)
            for group, table in zip(buffers.groups, tables, strict=False)
            if table is not None
        ],
        sliding_windows=set(plan.source.config.attention_windows),
    )
    undo.callback(planner.close)
    return planner


def _make_cuda_recorder(
    plan: EnginePlan, draft: DraftSetup | None, num_copies: int
) -> tuple[CudaRecorder | None, GraphSampler | None]:
    """The recorder of CUDA graphs, and the sampler that reads the captured programs' outputs.

    Both are None on a CPU, and for an encoder, whose steps are captured on a CPU only. Only rank 0
    samples, so other ranks have no sampler. Stages before the last have no logits either.
    """
    source = plan.source
    if plan.is_cpu or not source.config.kind.generates:
        return None, None
    if not source.shard.stage.is_last:
        return CudaRecorder(), None
    rows, vocab_size = source.limits.max_num_rows, source.config.vocab_size
    logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=source.device)
    shared = None if draft is None else draft.recorder
    recorder = CudaRecorder(logits) if shared is None else shared.sharing_pool(logits)
    if not source.shard.is_leader:
        return recorder, None
    captured = plan.config.graphs.mode is GraphMode.captured
    return recorder, GraphSampler(
        logits,
        recorder=recorder.sharing_pool() if captured else None,
        num_host_copies=num_copies,
    )


def _make_runner(
    plan: EnginePlan,
    model: LanguageModel,
    graphs: GraphRunner,
    buffers: StaticBuffers,
    token_sampler: GraphSampler | None,
    grammars: GrammarStore,
    encoding: EncoderParts,
) -> ModelRunner:
    source = plan.source
    sampler = None  # only rank 0 samples
    group = model.logits_group
    if source.shard.is_leader:
        divided = None if group is None else DividedSampler(group, source.config.vocab_size)
        sampler = Sampler(
            max_num_seqs=source.limits.max_num_seqs,
            vocab_size=source.config.vocab_size,
            device=source.device,
            token_sampler=token_sampler or divided,
            matchers=grammars.matcher,
            reports_forced=plan.config.speculation.drafter.uses_grammar,
        )
    # In small steps the CPU kernels can use several threads, while torch uses one.
    is_eager = plan.config.graphs.mode is GraphMode.eager
    switches = plan.is_cpu and source.weights.uses_cpu_kernels and not is_eager
    threads = StepThreads(plan.threads) if switches else None
    pooler = Pooler(
        model.classify if isinstance(model, EncoderModel) else None,
        has_raw_scores=source.config.has_raw_scores,
    )
    keeps_states = graphs.aux is not None and source.shard.is_leader
    states = _keep_hidden_states(plan) if keeps_states else None
    return ModelRunner(graphs, buffers, sampler, threads, pooler, states, group, encoding.tensors)


def _make_executor(  # noqa: PLR0913 - the parts of an executor
    plan: EnginePlan,
    model: LanguageModel,
    runner: ModelRunner,
    kv_cache: KVCache,
    grammars: GrammarStore,
    monitor: CompileMonitor,
    pages: CachePages | None,
    encoding: EncoderParts,
    undo: ExitStack,
) -> InlineExecutor:
    space, adapters, tiers = plan.source.adapters, None, None
    if space is not None:
        # A start without adapters saves the import. So does one without tiers below.
        from ostinato.runtime.execution.rank_adapters import RankAdapters

        adapters = RankAdapters(model, space)
    if plan.config.cache.has_tiers:
        from ostinato.runtime.tiers.rank_tiers import RankTiers

        tiers = RankTiers(
            kv_cache,
            num_host_places=plan.num_host_places,
            has_disk=bool(plan.config.cache.disk_dir),
            rank=plan.source.shard.number,
        )
        undo.callback(tiers.close)
    return InlineExecutor(
        runner,
        kv_cache,
        grammars,
        monitor,
        pages=pages,
        overlap=plan.overlap,
        adapters=adapters,
        tiers=tiers,
        encoder=encoding.encoder,
    )


def _keep_hidden_states(plan: EnginePlan) -> KeptStates:
    source = plan.source
    if plan.is_cpu:
        return HiddenStates()
    width = source.head_inputs.width(source.config.hidden_size)
    return HiddenStatePool(num_pool_slots(source.limits), width, source.dtype, source.device)


def _prepare_graphs(
    plan: EnginePlan,
    graphs: GraphRunner,
    token_sampler: GraphSampler | None,
    memory: CudaMemory | None,
    phase: PhaseTimer,
    name: str,
) -> None:
    """Run every kind of step once, and capture the buckets that fit into the memory.

    `memory` is that of the GPU; None on a CPU, and for an encoder. The lines of the log begin with
    `name`.
    """
    config, limits = plan.config.graphs, plan.source.limits
    with phase("warm-up"):
        graphs.warm_up(plan.warm_up_steps)
        if token_sampler is not None:
            token_sampler.warm_up()
    if config.mode is not GraphMode.captured:
        return
    if gaps := why_incomplete(config.capture_sizes, limits.max_num_seqs):
        _LOG.warning("%s", gaps)
    with phase("capture"):
        free = 0 if memory is None else memory.free()
        left_out = _capture(graphs, must_fit=plan.source.shard.num_ranks > 1)
        draws = [] if token_sampler is None else token_sampler.capture()
    if left_out or draws:
        _LOG.warning("%s%s", name, _capture_warning(left_out, len(draws)))
    if memory is not None:
        num_graphs = graphs.num_captured
        num_graphs += 0 if token_sampler is None else len(token_sampler.captured_keys)
        text = compare_with_plan(plan.memory, free_before_capture=free, free_now=memory.free())
        _LOG.info("%s%d graphs captured; %s", name, num_graphs, text)


def _capture(graphs: GraphRunner, *, must_fit: bool) -> list[GraphKey]:
    """Capture all buckets; returns those that did not fit into the memory.

    Raises:
        StartupError: with `must_fit`, a bucket did not fit.
    """
    try:
        return graphs.capture(must_fit=must_fit)
    except (MemoryError, RuntimeError) as error:
        if not must_fit or not is_out_of_memory(error):
            raise
        raise StartupError(
            "a rank ran out of memory during capture; lower cache.memory_gib or "
            "scheduler.max_num_seqs"
        ) from error


def _count_layers(graphs: GraphRunner) -> str:
    """How the layers run in a step of few tokens, for example "6 captured, 2 fx"."""
    counts = graphs.layers_by_program.items()
    return ", ".join(f"{count} {program}" for program, count in counts if count)


def _capture_warning(left_out: list[GraphKey], num_draws: int) -> str:
    """A warning that names the buckets that did not fit into the memory, and the remedies."""
    parts = [name_buckets(left_out)] if left_out else []
    parts += [f"{num_draws} buckets of the sampler"] if num_draws else []
    return (
        f"out of memory during capture, buckets left out: {'; '.join(parts)}. Their steps run in "
        "larger buckets or uncaptured, and take longer; lower cache.memory_gib, "
        "device.memory_fraction or scheduler.max_num_seqs, or shorten graphs.capture_sizes"
    )
