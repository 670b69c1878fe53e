"""From a configuration to a ready engine: the composition root, one phase after the other.

    open -> plan -> weights -> pack -> cache -> compile -> capture -> seal

Every mistake of configuration or environment that shows on the way is a `StartupError` of one line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ostinato.conf.root import EngineConfig
from ostinato.conf.schema import GraphMode, LoadFormat
from ostinato.graphs.buckets import BucketTable, default_decode_sizes, default_mixed_sizes
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.capture import BoundRecorder, CudaRecorder, GraphRunner
from ostinato.graphs.compile import Binder, compile_model
from ostinato.graphs.seal import CompileMonitor
from ostinato.graphs.threads import StepThreads
from ostinato.models.base import CausalLM, KVCache
from ostinato.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    resolve_directory,
)
from ostinato.models.config import ModelConfig, resolve_dtype
from ostinato.models.packing import pack_model
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.weights import init_dummy_weights, load_weights
from ostinato.ops.attention import AttentionPlanner, PlannedBackend, load_backend, select_backend
from ostinato.ops.native import build as native
from ostinato.runtime.device import resolve_device, set_threads
from ostinato.runtime.engine import Engine
from ostinato.runtime.errors import StartupError
from ostinato.runtime.kv_cache import KVCacheManager
from ostinato.runtime.memory import (
    GraphFootprint,
    MemoryPlan,
    ModelFootprint,
    free_memory,
    plan_memory,
)
from ostinato.runtime.model_runner import ModelRunner
from ostinato.runtime.sampler import Sampler
from ostinato.runtime.scheduler import Scheduler
from ostinato.runtime.types import ServedModel

__all__ = ("ModelSource", "build_engine", "open_model", "plan_engine")

Report = Callable[[str, float], None]
"""Called with a finished phase's name and its seconds; from two threads, one at a time each."""

Phase = Callable[[str], AbstractContextManager[None]]

_LOG = logging.getLogger(__name__)

# generation_config.json's fields that are defaults of a request.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that was found and understood, but not loaded."""

    checkpoint: Checkpoint
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype


def open_model(config: EngineConfig, device: torch.device | None = None) -> ModelSource:
    """Find the model and read its configuration; loads no weights.

    Args:
        config: the engine's configuration.
        device: to plan for a device that is not here; None = the configured one.

    Raises:
        StartupError: no such model, or one that is not supported.
    """
    try:
        checkpoint = open_checkpoint(config.model)
        model_config = read_model_config(checkpoint)
    except ValueError as error:
        raise StartupError(str(error)) from error
    return ModelSource(
        checkpoint=checkpoint,
        config=model_config,
        device=device or resolve_device(config.device.name),
        dtype=resolve_dtype(config.model.dtype, model_config),
    )


def plan_engine(
    config: EngineConfig, source: ModelSource, *, free_bytes: int | None = None
) -> MemoryPlan:
    """The memory plan of an engine; allocates nothing.

    Args:
        config: the engine's configuration.
        source: from `open_model`.
        free_bytes: to plan for another machine; None = what is free on this one.

    Raises:
        StartupError: it does not fit.
    """
    model = source.config
    is_cpu = source.device.type == "cpu"
    skeleton = build_model(
        model, dtype=source.dtype, device=torch.device("meta"), attention_backend="reference"
    )
    tensors = [*skeleton.parameters(), *skeleton.buffers()]
    keys = bucket_table(config, is_cpu=is_cpu).keys
    return plan_memory(
        ModelFootprint(
            weights_bytes=sum(tensor.numel() * tensor.itemsize for tensor in tensors),
            kv_bytes_per_token=model.kv_cache_spec(1, source.dtype).bytes_per_block,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            qkv_size=(model.num_heads + 2 * model.num_kv_heads) * model.head_dim,
            vocab_size=model.vocab_size,
            dtype_bytes=source.dtype.itemsize,
            max_model_len=model.max_model_len,
        ),
        free_bytes=free_memory(is_cpu=is_cpu).free_bytes if free_bytes is None else free_bytes,
        is_cpu=is_cpu,
        device=config.device,
        cache=config.cache,
        scheduler=config.scheduler,
        max_model_len=config.model.max_model_len,
        graphs=GraphFootprint(
            num_graphs=len(keys), max_tokens=max((key.num_tokens for key in keys), default=0)
        ),
    )


def bucket_table(config: EngineConfig, *, is_cpu: bool) -> BucketTable:
    """The buckets to capture; empty unless graphs.mode=captured."""
    graphs, scheduler = config.graphs, config.scheduler
    if graphs.mode is not GraphMode.captured:
        return BucketTable(decode_sizes=[], mixed_sizes=[], max_num_seqs=scheduler.max_num_seqs)
    decode_sizes = graphs.capture_sizes or default_decode_sizes(
        scheduler.max_num_seqs, exact=is_cpu
    )
    # On a CPU a mixed bucket would compute its padding, and there is no launch cost to save.
    mixed_sizes = [] if is_cpu else default_mixed_sizes(scheduler.max_num_batched_tokens)
    return BucketTable(
        decode_sizes=decode_sizes, mixed_sizes=mixed_sizes, max_num_seqs=scheduler.max_num_seqs
    )


def build_engine(config: EngineConfig, report: Report = lambda name, seconds: None) -> Engine:
    """Build everything and return an engine that compiles nothing any more.

    The weights are loaded on a thread of their own while the main thread traces and compiles: the
    one waits for disk and the C++ compiler, the other is Python.

    Args:
        config: the whole configuration; each component is handed its section.
        report: told of each finished phase.

    Raises:
        StartupError: the engine can not start as configured; one line with the remedy.
    """
    try:
        return _build_engine(config, report)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise StartupError(
            f"the device ran out of memory while the engine was built ({_first_line(error)}); set "
            "cache.memory_gib, lower device.memory_fraction or use graphs.mode=compiled"
        ) from error


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, now or before: a capture that lacked memory raises again when
    it is closed.
    """
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            words in text for words in ("out of memory", "can't allocate memory")
        ):
            return True
        error = error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _build_engine(config: EngineConfig, report: Report) -> Engine:
    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        phases[name] = time.perf_counter() - begin
        report(name, phases[name])

    monitor = CompileMonitor()
    threads = set_threads(config.device)
    with phase("open"):
        source = open_model(config)
        plan = plan_engine(config, source)
        backend = _select_backend(config, source)
        _check_graphs(config, source, backend)
    with torch.inference_mode(), ThreadPoolExecutor(1, "load") as loader:
        model = _build(config, source, backend, plan.max_model_len)
        loading = loader.submit(_load, config, source, model, backend, phase)
        spec = source.config.kv_cache_spec(config.cache.block_size, source.dtype)
        kv_cache = spec.allocate(plan.num_blocks, source.device)
        buffers = StaticBuffers(
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_blocks_per_seq=-(-plan.max_model_len // config.cache.block_size),
            block_size=config.cache.block_size,
            device=source.device,
        )
        # Packing changes the form of the weights, so what is traced is a model in the final form
        # whose memory is never touched. A GPU's memory is taken as soon as it is reserved: there
        # the model itself is traced, while it is filled.
        prototype = model
        if _packs(config, source):
            prototype = _build(config, source, backend, plan.max_model_len)
            pack_model(prototype, fill=False)
        bind = _compile(config, prototype, kv_cache, buffers, phase)
        loading.result()
        graphs = _prepare_graphs(
            config,
            GraphRunner(
                model,
                kv_cache,
                buffers,
                program=None if bind is None else bind(model),
                table=bucket_table(config, is_cpu=source.device.type == "cpu"),
                recorder=BoundRecorder() if source.device.type == "cpu" else CudaRecorder(),
                planner=_make_planner(config, source, backend, buffers),
            ),
            phase,
        )
    monitor.seal()
    cache = KVCacheManager(
        plan.num_blocks,
        config.cache.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    scheduler = Scheduler(config.scheduler, cache, max_model_len=plan.max_model_len)
    sampler = Sampler(
        max_num_seqs=config.scheduler.max_num_seqs,
        vocab_size=source.config.vocab_size,
        device=source.device,
    )
    return Engine(
        scheduler,
        cache,
        ModelRunner(graphs, buffers, sampler, _step_threads(config, source, threads)),
        monitor,
        _served_model(config, source, plan, phases),
    )


def _select_backend(config: EngineConfig, source: ModelSource) -> str:
    spec = source.config.attention_spec(config.cache.block_size, source.dtype, source.device)
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
    if config.scheduler.max_num_batched_tokens > most:
        raise StartupError(
            f"scheduler.max_num_batched_tokens={config.scheduler.max_num_batched_tokens}, but "
            f"compiled kernels of this model take at most {most} tokens a step; lower it"
        )


def _build(config: EngineConfig, source: ModelSource, backend: str, max_model_len: int) -> CausalLM:
    return build_model(
        source.config,
        dtype=source.dtype,
        device=source.device,
        attention_backend=backend,
        max_model_len=max_model_len,
    )


def _packs(config: EngineConfig, source: ModelSource) -> bool:
    return config.graphs.pack_weights and source.device.type == "cpu"


def _load(
    config: EngineConfig, source: ModelSource, model: CausalLM, backend: str, phase: Phase
) -> None:
    """Give the model its weights in their final form, and load the kernels that it calls."""
    packs = _packs(config, source)
    try:
        if packs or backend == "cpu":
            with phase("native kernels"):
                native.load()
        with phase("weights"), torch.inference_mode():
            if config.model.load_format is LoadFormat.dummy:
                init_dummy_weights(model, config.model.seed)
            else:
                load_weights(model, source.checkpoint, progress=True)
        if packs:
            with phase("pack"), torch.inference_mode():
                pack_model(model)
    except (CheckpointError, native.NativeBuildError) as error:
        raise StartupError(str(error)) from error


def _compile(
    config: EngineConfig,
    prototype: CausalLM,
    kv_cache: KVCache,
    buffers: StaticBuffers,
    phase: Phase,
) -> Binder | None:
    """The compiled program, from a model whose weights may hold anything."""
    if config.graphs.mode is GraphMode.eager:
        return None
    with phase("compile"):
        # Any shape of at least 2 will do: the traced program takes every one.
        tokens = min(16, config.scheduler.max_num_batched_tokens)
        seqs = min(2, config.scheduler.max_num_seqs)
        example = buffers.batch(tokens, seqs, seqs).forward
        return compile_model(prototype, config.graphs.form, example, kv_cache)


def _step_threads(config: EngineConfig, source: ModelSource, threads: int) -> StepThreads | None:
    """The switch, where all that is worth several threads in a small step is our own kernels."""
    if config.graphs.mode is GraphMode.eager or not _packs(config, source):
        return None
    if source.dtype is torch.float16:  # not packed: its matrix products are torch's
        return None
    native.set_threads(threads)
    return StepThreads(threads)


def _make_planner(
    config: EngineConfig, source: ModelSource, backend: str, buffers: StaticBuffers
) -> AttentionPlanner | None:
    """The host side of a backend that plans its steps; None for those that do not."""
    planned = load_backend(backend)
    if not isinstance(planned, PlannedBackend):
        return None
    return planned.make_planner(
        source.config.attention_spec(config.cache.block_size, source.dtype, source.device),
        bucket_table(config, is_cpu=False).keys,
        max_blocks_per_seq=buffers.host.block_table.shape[1],
        sliding_windows=set(source.config.sliding_windows),
    )


def _prepare_graphs(config: EngineConfig, runner: GraphRunner, phase: Phase) -> GraphRunner:
    """Run every kind of step once, capture the buckets."""
    with phase("warm-up"):
        # The larger one first: GPU kernels are tuned for the first shape that they see.
        runner.warm_up([(min(64, config.scheduler.max_num_batched_tokens), 1), (1, 1)])
    if config.graphs.mode is GraphMode.captured:
        with phase("capture"):
            runner.capture()
    return runner


def _served_model(
    config: EngineConfig, source: ModelSource, plan: MemoryPlan, phases: dict[str, float]
) -> ServedModel:
    section = config.model
    directory = source.checkpoint.directory
    generation = source.checkpoint.generation_config
    defaults = {
        key: generation[key]
        for key in _SAMPLING_DEFAULTS
        if config.sampling.use_generation_config and generation.get(key) is not None
    }
    if generation.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    # Dummy weights without a directory borrow the demo model's tokenizer: resolve_directory("").
    tokenizer = directory
    if section.tokenizer or directory is None:
        tokenizer = resolve_directory(
            section.tokenizer, section.revision, weights=False, key="model.tokenizer"
        )
    return ServedModel(
        name=section.name or _name(section.path, directory),
        max_model_len=plan.max_model_len,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.config.eos_token_ids,
        tokenizer=str(tokenizer),
        default_sampling=defaults,
        created=int(time.time()),
        startup_seconds=phases,
    )


def _name(path: str, directory: Path | None) -> str:
    if not path:
        return "ostinato-demo" if directory is not None else "dummy"
    return Path(path).name if Path(path).is_dir() else path
