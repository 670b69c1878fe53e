"""Builds the model of an engine; one thread loads the weights while the main thread compiles.

The loading thread mostly waits for the disk and the C++ compiler, and the main thread traces
Python.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import torch

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import GraphMode, LoadFormat, Quantization
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.bundle import Bundle
from ostinato.graphs.compiler.compile import Binder, compile_model
from ostinato.graphs.compiler.dynamo_trace import SizeGuardError
from ostinato.graphs.kernel_archive import adopt_triton_kernels
from ostinato.models.base import LanguageModel
from ostinato.models.checkpoints.checkpoint import CheckpointError
from ostinato.models.checkpoints.weights import init_dummy_weights, load_weights
from ostinato.models.config.model_kind import DECODER
from ostinato.models.decoder import Decoder
from ostinato.models.kv_cache import KVCache
from ostinato.models.layers.linear_layers import join_group
from ostinato.models.registry import build_model
from ostinato.models.sharding import Shard
from ostinato.ops.native import library as native
from ostinato.ops.native.build import NativeBuildError
from ostinato.ops.native.instruction_sets import detect_isa
from ostinato.ops.parallel.distributed_group import DistributedGroup
from ostinato.ops.parallel.exchange import Exchange, RankGroup
from ostinato.ops.parallel.group import ParallelGroup
from ostinato.ops.parallel.segment import create_segment
from ostinato.runtime.early_start.torch_import import import_rest
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.bundles import (
    bundle_root,
    core_part,
    kernel_libraries,
    planned_isa,
)
from ostinato.runtime.startup.model_cache import LoadedModel, LoadedModelCache
from ostinato.runtime.startup.phases import PhaseTimer
from ostinato.runtime.startup.plan.engine_plan import EnginePlan
from ostinato.runtime.startup.plan.model_source import ModelSource
from ostinato.runtime.startup.served_model import model_name

__all__ = ("begin_model", "load_tables", "open_bundle")


def begin_model(
    plan: EnginePlan,
    loader: ThreadPoolExecutor,
    phase: PhaseTimer,
    model_cache: LoadedModelCache | None,
) -> tuple[LanguageModel, Callable[[KVCache, StaticBuffers, Bundle | None], Binder | None]]:
    """Start to load a model, or take it from `model_cache`.

    Returns:
        The model, and a function that compiles its program and waits for the weights.
    """
    config, memory = plan.config, plan.memory
    # The key names everything that a loaded model depends on.
    sections = (
        config.model,
        config.device,
        config.graphs,
        plan.source.adapters,
        config.images,
        config.audio,
    )
    cache = (config.cache.block_size, config.cache.dtype)
    source = plan.source
    parts = (*sections, *cache, plan.backend, memory.max_model_len, source.shard, source.kv_groups)
    key = repr(parts)
    kept = None if model_cache is None else model_cache.get(key)
    if kept is not None:
        return kept.model, lambda kv_cache, buffers, bundle: kept.bind
    with phase("build model"):
        model = _build(plan)
    loading = loader.submit(_load, plan, model, phase)

    def finish(kv_cache: KVCache, buffers: StaticBuffers, bundle: Bundle | None) -> Binder | None:
        with ExitStack() as compiled:
            prototype = _prototype(plan, model, compiled)
            bind = _compile(config, prototype, kv_cache, buffers, bundle, phase)
        loading.result()
        if model_cache is not None:
            model_cache.put(key, LoadedModel(model, bind))
        return bind

    return model, finish


def load_tables(plan: EnginePlan, tables: ModelSource, phase: PhaseTimer) -> Decoder:
    """Load the copies of a model's embedding and output head that its draft head reads.

    Args:
        plan: the plan of the model.
        tables: `ModelSource.tables` of the head.
        phase: times the phases.

    Raises:
        StartupError: the weights cannot be loaded.
    """
    plan = dataclasses.replace(plan, source=tables)
    model = _build(plan)
    assert isinstance(model, Decoder), "the plan refuses a head for other models"
    _load(plan, model, phase)
    return model


def _prototype(plan: EnginePlan, model: LanguageModel, undo: ExitStack) -> LanguageModel:
    """The model that is traced while `model` is loaded. Its weights have no defined contents.

    On a CPU, loading replaces the memory of weights, so a second model is traced. The second model
    never touches its memory, so it costs nothing. On a GPU a second model would take memory, so
    `model` itself is traced while it is loaded. It must join its group of ranks again afterwards.
    """
    prototype = _build_all_stages(plan, plan.source.device) if plan.is_cpu else model
    if plan.source.shard.size > 1:  # one rank traces while the others load
        join_group(prototype, undo.enter_context(closing(_group_of_one(plan.source.exchange))))
    return prototype


def _group_of_one(exchange: Exchange) -> RankGroup:
    """A group in which this rank is alone."""
    if exchange.is_distributed:
        return DistributedGroup(0, 1, exchange)
    segment = create_segment(1)
    try:
        return ParallelGroup(segment, 0, 1)
    finally:
        os.close(segment)


def _build(plan: EnginePlan) -> LanguageModel:
    return _build_shard(plan, plan.source.shard, plan.source.device)


def _build_all_stages(plan: EnginePlan, device: torch.device) -> LanguageModel:
    """The model with the layers of all stages."""
    shard = plan.source.shard
    return _build_shard(plan, Shard(shard.rank, shard.size), device)


def _build_shard(plan: EnginePlan, shard: Shard, device: torch.device) -> LanguageModel:
    source = plan.source
    return build_model(
        source.config,
        dtype=source.dtype,
        device=device,
        attention_backend=plan.backend,
        max_model_len=plan.memory.max_model_len,
        weights=source.weights,
        shard=shard,
        exchange=source.exchange,
        has_cache_scales=source.has_cache_scales,
        experts=plan.experts,
        adapters=source.adapters,
        num_media_rows=source.num_media_rows,
        cross=source.cross,
    )


def _load(plan: EnginePlan, model: LanguageModel, phase: PhaseTimer) -> None:
    """Give the model its weights in their final form, and load the kernels that it calls."""
    config, source = plan.config, plan.source
    whole = None
    if source.shard.stage.layers is not None:
        whole = _build_all_stages(plan, torch.device("meta"))
    try:
        if source.weights.uses_cpu_kernels or plan.backend == "cpu":
            with phase("native kernels"):
                _load_kernels(plan)
        else:
            native.complete_core(source.dtype)
        with phase("weights"), torch.inference_mode():
            if config.model.load_format is LoadFormat.dummy:
                import_rest()  # `torch.Generator` needs it
                # Random weights are made fast. Quantising them takes longer and shows its progress.
                is_quantized = config.model.quantization is not Quantization.none
                progress = _progress_of(plan) if is_quantized else ""
                init_dummy_weights(model, config.model.seed, progress=progress, whole=whole)
            else:
                load_weights(model, source.checkpoint, progress=_progress_of(plan), whole=whole)
    except (CheckpointError, NativeBuildError) as error:
        raise StartupError(str(error)) from error


def _load_kernels(plan: EnginePlan) -> None:
    """Load the kernels that the model calls."""
    part = core_part(plan.config)
    source = plan.source
    libraries = dict.fromkeys(kernel_libraries(plan.config))
    if source.config.recurrent is not None:
        libraries["recurrent"] = None
    if source.weights.uses_cpu_kernels and source.weights.quantization != "none":
        libraries["quantized"] = None
        if _has_experts(source):
            libraries["quantized_moe"] = None
    for library in libraries:
        if library == "core" and part is not None and _suffices(part, plan):
            native.load_part(part)
        else:
            native.load(library)


def _has_experts(source: ModelSource) -> bool:
    """Whether a model has experts. The config of a traced model has only the keys of its file."""
    if source.config.traced is None:
        return source.config.moe is not None
    return any("expert" in key for key in source.checkpoint.hf_config)


def _suffices(part: str, plan: EnginePlan) -> bool:
    """Whether a part of the library `core` has all kernels that a model calls."""
    source = plan.source
    config = source.config
    return (
        part.removesuffix("-compressed") == f"core-{str(source.dtype).removeprefix('torch.')}"
        and source.cache_dtype is source.dtype
        and config.kind is DECODER
        and config.moe is None
        and config.traced is None
        and config.vision is None
        and config.audio is None
        and config.sound is None
        and source.draft is None
    )


def _progress_of(plan: EnginePlan) -> str:
    """The text of the progress bar; empty on ranks after the first, which show no bar."""
    if not plan.source.shard.is_leader:
        return ""
    kind = plan.config.model.quantization
    return "weights" if kind is Quantization.none else f"weights, quantised to {kind}"


def _compile(
    config: EngineConfig,
    prototype: LanguageModel,
    kv_cache: KVCache,
    buffers: StaticBuffers,
    bundle: Bundle | None,
    phase: PhaseTimer,
) -> Binder | None:
    """The compiled program. The contents of the prototype's weights do not matter.

    Raises:
        StartupError: the model compares a size that differs between steps.
    """
    if config.graphs.mode is GraphMode.eager:
        return None
    with phase("load programs" if bundle is not None and bundle.entries else "compile"):
        # Any sizes of at least 2 will do, because the traced program accepts all sizes.
        tokens = min(16, buffers.host.token_ids.size)
        seqs = min(2, buffers.host.seq_lens.size)
        example = buffers.batch(tokens, seqs, seqs, has_adapters=buffers.has_adapters)
        try:
            return compile_model(prototype, config.graphs.form, example, kv_cache, bundle)
        except SizeGuardError as error:
            raise StartupError(str(error)) from error


def _describe_ranks(source: ModelSource) -> str:
    """The number of tensor-parallel ranks, and how they exchange values if there are several."""
    size = source.shard.size
    return str(size) if size == 1 else f"{size}, {source.exchange}"


def open_bundle(plan: EnginePlan) -> Bundle | None:
    """The bundle of programs for this model, device and configuration; empty at the first start."""
    config, source = plan.config, plan.source
    graphs = config.graphs
    if not graphs.bundle or graphs.mode is GraphMode.eager:
        return None
    name = model_name(config.model, source.checkpoint.path)
    device, isa = "cpu", planned_isa(config.device)
    if source.device.type == "cuda":
        device, isa = torch.cuda.get_device_name(source.device), ""
    bundle = Bundle(
        bundle_root(graphs),
        f"{name}-{device}",
        {
            "model": repr(source.config),
            "dtype": f"{source.dtype}, cache {source.cache_dtype}",
            "cache_dtype": str(source.cache_dtype),
            "device": device,
            # The kernels in ops/native use the chosen instruction set. Compiled programs use the
            # best that the processor has.
            "isa": isa and f"{isa} of {detect_isa()}",
            "form": graphs.form.value,
            "attention": plan.backend,
            "experts": plan.experts.value,
            "weights": repr(source.weights),
            "cache_scales": str(source.has_cache_scales),
            "block_size": str(config.cache.block_size),
            "kv_groups": repr(source.kv_groups),
            "max_model_len": str(plan.memory.max_model_len),
            "ranks": _describe_ranks(source),
            "adapters": repr(source.adapters),
            "images": str(source.num_media_rows),
            "audio": repr(source.cross),
        },
    )
    if source.device.type == "cuda":
        adopt_triton_kernels(bundle)
    return bundle
