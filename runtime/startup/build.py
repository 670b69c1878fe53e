"""From a configuration to a ready engine: the composition root, one phase after the other.

    open -> plan -> weights -> cache -> compile -> capture -> seal

Every mistake of configuration or environment that shows on the way is a `StartupError` of one line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch

from ostinato.conf.engine import EngineConfig
from ostinato.conf.errors import first_line
from ostinato.conf.schema import GraphMode
from ostinato.graphs.buckets import GraphKey, name_buckets, why_incomplete
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.bundle import Bundle
from ostinato.graphs.capture import GraphRunner
from ostinato.graphs.draw import StaticDrawer
from ostinato.graphs.recorder import BoundRecorder, CudaRecorder, Recorder, is_out_of_memory
from ostinato.graphs.seal import CompileMonitor
from ostinato.graphs.threads import StepThreads
from ostinato.graphs.timing import make_timer
from ostinato.models.base import EncoderModel, LanguageModel
from ostinato.ops.attention import AttentionPlanner, PlannedBackend, load_backend, select_backend
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.engine.step_observer import StepObserver
from ostinato.runtime.errors import StartupError
from ostinato.runtime.execution.grammar_masks import MatcherSource
from ostinato.runtime.execution.inline_executor import InlineExecutor
from ostinato.runtime.execution.model_runner import ModelRunner
from ostinato.runtime.execution.pooler import Pooler
from ostinato.runtime.execution.sampler import Sampler
from ostinato.runtime.grammar.store import GrammarStore
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.kv.page_mapper import map_ahead
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.startup.bundles import add_kernels
from ostinato.runtime.startup.calibrate import CostStore, calibrate, make_scheduler
from ostinato.runtime.startup.device import set_threads
from ostinato.runtime.startup.loading import Phase, begin_model, open_bundle
from ostinato.runtime.startup.measured_memory import CudaMemory, compare_with_plan
from ostinato.runtime.startup.memory_plan import MemoryPlan
from ostinato.runtime.startup.model_cache import ModelShelf
from ostinato.runtime.startup.planning import (
    ModelSource,
    bucket_table,
    open_model,
    plan_engine,
    plan_measured,
)
from ostinato.runtime.startup.served_model import describe_model

__all__ = ("build_engine", "compile_bundle")

Report = Callable[[str, float], None]
"""Called with a finished phase's name and its seconds; from two threads, one at a time each."""

_LOG = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    report: Report = lambda name, seconds: None,
    observer: StepObserver | None = None,
    shelf: ModelShelf | None = None,
) -> Engine:
    """Build everything and return an engine that compiles nothing any more.

    A thread of its own loads the weights while the main thread traces and compiles.

    Args:
        config: the whole configuration; each component is handed its section.
        report: told of each finished phase.
        observer: is told of every step; None = one that writes no file.
        shelf: where the model of an earlier engine may lie, and this one's is put; None = load it.

    Raises:
        StartupError: the engine can not start as configured; one line with the remedy.
    """
    return _build(config, report, observer, shelf)[0]


def compile_bundle(config: EngineConfig, report: Report) -> Bundle | None:
    """Build an engine for the bundle that its start compiles and saves.

    Args:
        config: the engine's.
        report: told of each finished phase.

    Returns:
        The bundle; None when the configuration keeps none.

    Raises:
        StartupError: the engine can not start as configured; one line with the remedy.
    """
    engine, bundle = _build(config, report, None, None)
    engine.close()
    return bundle


def _build(
    config: EngineConfig,
    report: Report,
    observer: StepObserver | None,
    shelf: ModelShelf | None,
) -> tuple[Engine, Bundle | None]:
    try:
        with ExitStack() as undo:
            monitor = CompileMonitor()
            undo.callback(monitor.close)
            built = _build_engine(config, report, monitor, undo, observer, shelf)
            monitor.seal()
            undo.pop_all()
            return built
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(
            f"the device ran out of memory while the engine was built ({first_line(error)}); set "
            "cache.memory_gib, lower device.memory_fraction or use graphs.mode=compiled"
        ) from error


def _build_engine(
    config: EngineConfig,
    report: Report,
    monitor: CompileMonitor,
    undo: ExitStack,
    observer: StepObserver | None,
    shelf: ModelShelf | None,
) -> tuple[Engine, Bundle | None]:
    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        phases[name] = time.perf_counter() - begin
        report(name, phases[name])

    threads = set_threads(config.device)
    with phase("open"):
        source = open_model(config)
        plan = plan_engine(config, source)
        backend = _select_backend(config, source)
        _check_graphs(config, source, backend)
    with torch.inference_mode(), ThreadPoolExecutor(1, "load") as loader:
        model, finish = begin_model(config, source, backend, plan, loader, phase, shelf)
        buffers = _make_buffers(config, source, plan)
        planner = _make_planner(config, source, backend, buffers, undo)
        recorder, drawer = _make_recorder(config, source)
        if drawer is not None:
            with phase("measure"):
                plan = plan_measured(config, source, plan, model, buffers, planner, drawer)
        spec = source.config.kv_cache_spec(config.cache.block_size, source.cache_dtype)
        kv_cache = spec.allocate(plan.num_blocks, source.device)
        pages = map_ahead(kv_cache, spec)
        if pages is not None:
            undo.callback(pages.close)
        bundle = open_bundle(config, source, plan, backend)
        bind = finish(kv_cache, buffers, bundle)
        cost_store = CostStore(config.graphs, source.limits, threads, bundle)
        costs = cost_store.load()
        graphs = _prepare_graphs(
            config,
            source,
            plan,
            drawer,
            GraphRunner(
                model,
                kv_cache,
                buffers,
                program=None if bind is None else bind(model),
                table=bucket_table(config, source, costs),
                recorder=recorder,
                planner=planner,
                timer=make_timer(source.device),
            ),
            phase,
        )
        served = describe_model(config.model, config.sampling, source, plan, phases)
        grammars = GrammarStore(served)
        runner = _make_runner(
            config, source, model, graphs, buffers, drawer, threads, grammars.matcher
        )
        executor = InlineExecutor(
            runner, kv_cache, grammars, monitor, pages=pages, overlap=_overlaps(config, source)
        )
        if costs is None and cost_store.is_wanted and source.config.kind.generates:
            with phase("cost table"):
                is_cpu = source.device.type == "cpu"
                costs = calibrate(cost_store, executor, plan, served, is_cpu=is_cpu)
    _save(bundle, config, source, phase)
    cache, scheduler = _make_scheduler(config, source, plan, costs)
    return Engine(scheduler, cache, executor, served, cost_table=costs, observer=observer), bundle


def _make_scheduler(
    config: EngineConfig, source: ModelSource, plan: MemoryPlan, costs: CostTable | None
) -> tuple[KVCacheManager, Scheduler]:
    """The scheduler and the blocks that it deals out."""
    kind = source.config.kind
    cache = KVCacheManager(
        plan.num_blocks,
        config.cache.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching and kind.needs_kv_cache,
    )
    scheduler = make_scheduler(
        config.scheduler,
        cache,
        plan.max_model_len,
        source.limits,
        costs,
        whole_prompts=kind.takes_whole_prompts,
    )
    return cache, scheduler


def _save(bundle: Bundle | None, config: EngineConfig, source: ModelSource, phase: Phase) -> None:
    if bundle is None:
        return
    with phase("save bundle"):
        if source.device.type == "cpu":
            add_kernels(bundle, config.model)
        bundle.save()


def _overlaps(config: EngineConfig, source: ModelSource) -> bool:
    """On a CPU the step itself runs on the thread that would schedule meanwhile."""
    overlap = config.scheduler.overlap
    return source.device.type != "cpu" if overlap is None else overlap


def _make_buffers(config: EngineConfig, source: ModelSource, plan: MemoryPlan) -> StaticBuffers:
    return StaticBuffers(
        max_num_tokens=source.limits.max_num_batched_tokens,
        max_num_seqs=source.limits.max_num_seqs,
        max_blocks_per_seq=-(-plan.max_model_len // config.cache.block_size),
        block_size=config.cache.block_size,
        device=source.device,
        feeds=_overlaps(config, source) or None,
    )


def _make_runner(
    config: EngineConfig,
    source: ModelSource,
    model: LanguageModel,
    graphs: GraphRunner,
    buffers: StaticBuffers,
    drawer: StaticDrawer | None,
    threads: int,
    matchers: MatcherSource,
) -> ModelRunner:
    sampler = Sampler(
        max_num_seqs=source.limits.max_num_seqs,
        vocab_size=source.config.vocab_size,
        device=source.device,
        drawer=drawer,
        matchers=matchers,
    )
    pooler = Pooler(model.classify if isinstance(model, EncoderModel) else None)
    return ModelRunner(graphs, buffers, sampler, _step_threads(config, source, threads), pooler)


def _select_backend(config: EngineConfig, source: ModelSource) -> str:
    if not source.config.kind.needs_kv_cache:
        return ""  # its attention is another op, with one kernel
    spec = source.attention_spec(config.cache.block_size)
    try:
        return select_backend(config.graphs.attention.value, spec)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _check_graphs(config: EngineConfig, source: ModelSource, backend: str) -> None:
    """Refuse what would fail on a GPU late, or give wrong results without a word."""
    mode, model = config.graphs.mode, source.config
    if source.device.type == "cpu" or mode is GraphMode.eager:
        return
    if backend == "reference" and mode is GraphMode.captured:
        raise StartupError(
            "graphs.attention=reference reads lengths on the host, so its steps can not be "
            "captured; set graphs.mode=compiled"
        )
    # Compiled GPU kernels index with 32 bits; programs run without the guard that would notice.
    qkv_size = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    most = ((1 << 31) - 1) // max(model.hidden_size, 2 * model.intermediate_size, qkv_size)
    if source.limits.max_num_batched_tokens > most:
        raise StartupError(
            f"scheduler.max_num_batched_tokens={source.limits.max_num_batched_tokens}, but "
            f"compiled kernels of this model take at most {most} tokens a step; lower it"
        )


def _step_threads(config: EngineConfig, source: ModelSource, threads: int) -> StepThreads | None:
    """The switch, where all that is worth several threads in a small step is our own kernels."""
    if config.graphs.mode is GraphMode.eager or not source.weights.uses_cpu_kernels:
        return None
    return StepThreads(threads)


def _make_planner(
    config: EngineConfig,
    source: ModelSource,
    backend: str,
    buffers: StaticBuffers,
    undo: ExitStack,
) -> AttentionPlanner | None:
    """The host side of a backend that plans its steps; None for those that do not."""
    if not backend:
        return None
    planned = load_backend(backend)
    if not isinstance(planned, PlannedBackend):
        return None
    planner = planned.make_planner(
        source.attention_spec(config.cache.block_size),
        bucket_table(config, source).keys,
        max_blocks_per_seq=buffers.host.block_table.shape[1],
        sliding_windows=set(source.config.sliding_windows),
    )
    undo.callback(planner.close)
    return planner


def _make_recorder(
    config: EngineConfig, source: ModelSource
) -> tuple[Recorder, StaticDrawer | None]:
    """How programs are captured, and the draws of a GPU, whose inputs captured programs write."""
    if source.device.type == "cpu" or not source.config.kind.generates:
        return BoundRecorder(), None
    rows, vocab_size = source.limits.max_num_seqs, source.config.vocab_size
    logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=source.device)
    recorder = CudaRecorder(logits)
    captured = config.graphs.mode is GraphMode.captured
    return recorder, StaticDrawer(logits, recorder=recorder.sharing_pool() if captured else None)


def _prepare_graphs(
    config: EngineConfig,
    source: ModelSource,
    plan: MemoryPlan,
    drawer: StaticDrawer | None,
    runner: GraphRunner,
    phase: Phase,
) -> GraphRunner:
    """Run every kind of step once, capture the buckets; without some of them if memory is short."""
    with phase("warm-up"):
        # The larger one first: GPU kernels are tuned for the first shape that they see.
        runner.warm_up([(min(64, source.limits.max_num_batched_tokens), 1), (1, 1)])
    if config.graphs.mode is GraphMode.captured:
        if gaps := why_incomplete(config.graphs.capture_sizes, source.limits.max_num_seqs):
            _LOG.warning("%s", gaps)
        with phase("capture"):
            memory = None if drawer is None else CudaMemory()
            free = 0 if memory is None else memory.free()
            left_out = runner.capture()
            draws = [] if drawer is None else drawer.capture()
        if left_out or draws:
            _LOG.warning("%s", _capture_warning(left_out, len(draws)))
        if memory is not None:
            now = memory.free()
            _LOG.info("%s", compare_with_plan(plan, free_before_capture=free, free_now=now))
    return runner


def _capture_warning(left_out: list[GraphKey], num_draws: int) -> str:
    """What was not captured for lack of memory, and what helps."""
    parts = [name_buckets(left_out)] if left_out else []
    parts += [f"{num_draws} of the sampler's"] if num_draws else []
    return (
        f"out of memory during capture, buckets left out: {'; '.join(parts)}. Their steps run in "
        "larger buckets or uncaptured, and take longer; lower cache.memory_gib, "
        "device.memory_fraction or scheduler.max_num_seqs, or shorten graphs.capture_sizes"
    )
