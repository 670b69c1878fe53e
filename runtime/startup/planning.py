"""Plans an engine before it is built: the model, its buckets, its memory.

Nothing is allocated, except by `plan_measured`, which runs the largest step once on a CUDA device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ostinato.conf.engine_config import EngineConfig, draft_config
from ostinato.conf.schema import GraphMode, LoadFormat, PoolingChoice
from ostinato.conf.speculation.speculation_schema import SpeculationMethod
from ostinato.graphs.buckets import (
    BucketTable,
    default_decode_sizes,
    default_mixed_sizes,
    verified_tokens,
)
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.capture import GraphRunner
from ostinato.graphs.sampling_graph import GraphSampler, num_sampling_graphs
from ostinato.models.base import LanguageModel
from ostinato.models.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    resolve_path,
)
from ostinato.models.checkpoints.pooling_files import PoolingFiles, read_pooling_files
from ostinato.models.choose_weights import WeightPolicy, choose_weights
from ostinato.models.config.model_config import ModelConfig, resolve_cache_dtype, resolve_dtype
from ostinato.models.kv_cache import KVCacheSpec
from ostinato.models.registry import build_model, class_of, read_model_config
from ostinato.models.sharding import WHOLE, Shard
from ostinato.models.step_tensors import StepSizes, num_kv_groups
from ostinato.ops.attention import AttentionPlanner, AttentionSpec, workspace_bytes
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits, redundant_sizes, upper_limits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.memory.measured_memory import CudaMemory, measure
from ostinato.runtime.memory.memory_plan import (
    GIB,
    GraphFootprint,
    MeasuredMemory,
    MemoryPlan,
    ModelFootprint,
    free_memory,
    plan_memory,
)
from ostinato.runtime.sampling.sampler import sampling_bytes
from ostinato.runtime.startup.device import resolve_device
from ostinato.runtime.text.vocabulary import vocabulary_difference

__all__ = (
    "ModelSource",
    "bucket_table",
    "open_model",
    "plan_engine",
    "plan_measured",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model whose configuration has been read, and whose weights have not been loaded."""

    checkpoint: Checkpoint
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype  # of weights and activations
    cache_dtype: torch.dtype  # of keys and values in the cache
    limits: StepLimits  # the limits that buffers, buckets and memory are sized for
    pooling: PoolingFiles  # the pooling that the checkpoint states
    weights: WeightPolicy  # how each matrix is stored and multiplied
    shard: Shard = WHOLE  # the part of the model that this rank holds
    draft: ModelSource | None = None  # the draft model of `speculation.method=draft`

    def attention_spec(self, block_size: int) -> AttentionSpec:
        """The requirements of the model on an attention backend."""
        return self.config.attention_spec(
            block_size,
            self.dtype,
            self.device,
            cache_dtype=self.cache_dtype,
            shard=self.shard,
        )

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """The shapes of the KV cache on this rank."""
        return self.config.kv_cache_spec(block_size, self.cache_dtype, shard=self.shard)


def open_model(
    config: EngineConfig,
    device: torch.device | None = None,
    *,
    max_drafts: int | None = None,
    shard: Shard = WHOLE,
) -> ModelSource:
    """Find the model and read its configuration; loads no weights.

    Args:
        config: the engine's configuration.
        device: a device to plan for, which need not exist; None = the configured one.
        max_drafts: draft tokens of one sequence in one step, at most; 0 = no drafter, None = as
            configured.
        shard: the part of the model that this rank holds.

    Raises:
        StartupError: there is no such model, it is not supported, or it can not be divided among
            so many ranks.
    """
    try:
        checkpoint = open_checkpoint(config.model)
        model_config = read_model_config(checkpoint, config.model.implementation)
        pooling = read_pooling_files(checkpoint.path)
    except ValueError as error:
        raise StartupError(str(error)) from error
    if pooling.unsupported is not None and config.model.pooling is PoolingChoice.auto:
        raise StartupError(f"{pooling.unsupported}; choose one with model.pooling")
    if (reason := model_config.why_unshardable(shard.size)) is not None:
        raise StartupError(f"parallel.tensor={shard.size}: {reason}")
    dtype = resolve_dtype(config.model.dtype, model_config)
    device = device or resolve_device(config.device.name)
    is_cpu = device.type == "cpu"
    if shard.size > 1 and not is_cpu:
        raise StartupError(
            f"parallel.tensor={shard.size} divides a model among processes of a CPU, and this one "
            f"runs on {device.type}; set parallel.tensor=1, or device.name=cpu"
        )
    max_drafts = config.speculation.max_drafts if max_drafts is None else max_drafts
    limits = upper_limits(config.scheduler, is_cpu=is_cpu, max_drafts=max_drafts)
    _check_speculation(config, model_config, limits)
    if model_config.kind.takes_whole_prompts:
        length = config.model.max_model_len or pooling.max_seq_length or model_config.max_model_len
        limits = _encoder_limits(config, limits, length)
    weights = _choose_weights(config, checkpoint, device, dtype)
    cache_dtype = resolve_cache_dtype(config.cache.dtype, dtype)
    if cache_dtype is torch.float8_e4m3fn and weights.has_cache_scales:
        raise StartupError(
            f"cache.dtype={config.cache.dtype}, but the checkpoint has scales of its own for keys "
            "and values (k_scale, v_scale), which are not supported; set cache.dtype=auto"
        )
    source = ModelSource(
        checkpoint=checkpoint,
        config=model_config,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        limits=limits,
        pooling=pooling,
        weights=weights,
        shard=shard,
    )
    if not config.speculation.method.uses_model:
        return source
    return dataclasses.replace(source, draft=_open_draft(config, source))


def _open_draft(config: EngineConfig, target: ModelSource) -> ModelSource:
    """The draft model.

    Raises:
        StartupError: there is none, it is not supported, or it does not fit to the target.
    """
    path, key = config.speculation.model, f"speculation.model={config.speculation.model}"
    if target.device.type != "cpu":
        raise StartupError(
            f"speculation.method=draft needs a CPU, and the model runs on {target.device.type}; "
            "set speculation.method=auto"
        )
    if target.shard != WHOLE:
        raise StartupError(
            f"speculation.method=draft runs on one rank, and parallel.tensor={target.shard.size}; "
            "set speculation.method=auto or parallel.tensor=1"
        )
    try:
        resolve_path(path, weights=False, key="speculation.model")
        draft = open_model(draft_config(config), target.device)
    except CheckpointError as error:
        raise StartupError(str(error)) from error
    except StartupError as error:
        raise StartupError(f"{key} can not be the draft model: {error}") from error
    reason = _why_no_draft(config, draft, target)
    if reason is not None:
        raise StartupError(f"{key} can not be the draft model: {reason}")
    return draft


def _why_no_draft(config: EngineConfig, draft: ModelSource, target: ModelSource) -> str | None:
    """Why a model can not draft for the target; None if it can."""
    if not draft.config.kind.generates:
        return f"{draft.config.architecture} does not generate"
    if num_kv_groups(class_of(draft.config).step_tensors) > 1:
        return f"{draft.config.architecture} has an encoder"
    sizes = draft.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        return f"it has another vocabulary, of {sizes[0]} tokens, and the model's has {sizes[1]}"
    if config.model.load_format is LoadFormat.dummy or config.model.tokenizer:
        return None
    paths = draft.checkpoint.path, target.checkpoint.path
    if paths[0] is None or paths[1] is None:
        return None
    return vocabulary_difference(paths[0], paths[1])


def _choose_weights(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> WeightPolicy:
    """Choose the weight method of each matrix.

    Raises:
        StartupError: no kernel supports the quantization with this device, dtype or setting.
    """
    pack = config.graphs.pack_weights
    try:
        return choose_weights(config.model, checkpoint, pack=pack, device=device, dtype=dtype)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _check_speculation(config: EngineConfig, model: ModelConfig, limits: StepLimits) -> None:
    """Refuse drafts that the model or the largest step can not have.

    Raises:
        StartupError: the model does not generate, or a step has fewer tokens than a draft.
    """
    method, max_tokens = config.speculation.method, config.speculation.max_tokens
    if method is SpeculationMethod.none:
        return
    if not model.kind.generates:
        raise StartupError(
            f"speculation.method={method} is for models that generate, and {model.architecture} "
            "does not; set speculation.method=none"
        )
    if (most := limits.max_num_batched_tokens) < 1 + max_tokens:
        raise StartupError(
            f"speculation.max_tokens={max_tokens} needs steps of {1 + max_tokens} tokens, and "
            f"scheduler.max_num_batched_tokens={most}; lower the first or raise the second"
        )


def _encoder_limits(config: EngineConfig, limits: StepLimits, max_model_len: int) -> StepLimits:
    """The limits of an encoder's steps, which have room for a whole text.

    Raises:
        StartupError: the configured step is too small, or scheduler.itl_target_ms is set.
    """
    if config.scheduler.itl_target_ms is not None:
        raise StartupError("scheduler.itl_target_ms is for models that generate; leave it null")
    if config.scheduler.max_num_batched_tokens is None:
        most = max(limits.max_num_batched_tokens, max_model_len)
        return limits._replace(max_num_batched_tokens=most)
    if limits.max_num_batched_tokens < max_model_len:
        raise StartupError(
            f"scheduler.max_num_batched_tokens={limits.max_num_batched_tokens}, but an encoder "
            f"computes a whole text in one step, up to model.max_model_len={max_model_len} tokens; "
            "raise the first or lower the second"
        )
    return limits


def plan_engine(
    config: EngineConfig,
    source: ModelSource,
    *,
    free_bytes: int | None = None,
    measured: MeasuredMemory | None = None,
) -> MemoryPlan:
    """The memory plan of an engine; allocates nothing.

    Args:
        config: the engine's configuration.
        source: from `open_model`.
        free_bytes: free memory of the machine to plan for; None = the free memory of this one.
        measured: measured memory of the device; None = plan with estimates.

    Raises:
        StartupError: the engine does not fit into the memory.
    """
    is_cpu = source.device.type == "cpu"
    keys = bucket_table(config, source).keys
    limits = source.limits
    draft = None if source.draft is None else _footprint(draft_config(config), source.draft)
    return plan_memory(
        dataclasses.replace(_footprint(config, source), measured=measured, draft=draft),
        free_bytes=_free_bytes(config, is_cpu=is_cpu) if free_bytes is None else free_bytes,
        is_cpu=is_cpu,
        device=config.device,
        cache=config.cache,
        scheduler=limits,
        max_model_len=config.model.max_model_len or source.pooling.max_seq_length,
        graphs=GraphFootprint(
            num_graphs=len(keys) + num_sampling_graphs(limits.max_num_rows) if keys else 0,
            max_tokens=max((key.num_tokens for key in keys), default=0),
        ),
    )


def _skeleton(source: ModelSource) -> LanguageModel:
    """The model of this rank without memory, for the sizes of its weights.

    Raises:
        StartupError: a quantised matrix can not be divided among so many ranks.
    """
    try:
        return build_model(
            source.config,
            dtype=source.dtype,
            device=torch.device("meta"),
            attention_backend="reference",
            weights=source.weights,
            shard=source.shard,
        )
    except ValueError as error:
        if source.shard == WHOLE:
            raise
        raise StartupError(f"parallel.tensor={source.shard.size}: {error}") from error


def _qkv_size(source: ModelSource) -> int:
    """Values of one token between the projections and the attention, on this rank."""
    model, shard = source.config, source.shard
    if shard == WHOLE:
        return (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    num_kv_heads = shard.kv_heads(model.num_kv_heads).size
    return (model.num_heads // shard.size + 2 * num_kv_heads) * model.head_dim


def _footprint(config: EngineConfig, source: ModelSource) -> ModelFootprint:
    """The sizes of a model."""
    model, limits = source.config, source.limits
    skeleton = _skeleton(source)
    tensors = [*skeleton.parameters(), *skeleton.buffers()]
    return ModelFootprint(
        weights_bytes=sum(tensor.numel() * tensor.itemsize for tensor in tensors),
        kv_bytes_per_token=source.kv_cache_spec(1).bytes_per_block,
        hidden_size=model.hidden_size,
        # Some values of experts are as wide as the hidden states. Every rank holds them whole.
        intermediate_size=model.widest_mlp // (1 if model.has_experts else source.shard.size),
        qkv_size=_qkv_size(source),
        dtype_bytes=source.dtype.itemsize,
        max_model_len=model.max_model_len,
        num_fixed_groups=num_kv_groups(type(skeleton).step_tensors) - 1,
        max_encoder_tokens=model.max_encoder_tokens,
        sampling_bytes=sampling_bytes(limits.max_num_rows, limits.max_num_seqs, model.vocab_size)
        if model.kind.generates
        else 0,
        workspace_bytes=workspace_bytes(
            config.graphs.attention.value,
            source.attention_spec(config.cache.block_size),
            num_tokens=limits.max_num_batched_tokens,
            num_seqs=limits.max_num_seqs,
            max_model_len=config.model.max_model_len or model.max_model_len,
        )
        if model.kind.needs_kv_cache
        else 0,
    )


def _free_bytes(config: EngineConfig, *, is_cpu: bool) -> int:
    """Free memory of this machine, as far as the engine may plan with it."""
    free, limit_gib = free_memory(is_cpu=is_cpu).free_bytes, config.device.memory_gib
    return free if limit_gib is None else min(free, int(limit_gib * GIB))


def bucket_table(
    config: EngineConfig, source: ModelSource, costs: CostTable | None = None
) -> BucketTable:
    """The buckets to capture.

    The table is empty unless graphs.mode=captured, and for an encoder, whose steps rarely have the
    same shape twice. On a CPU every number of decodes has a bucket, because buckets cost nothing.

    Args:
        config: the engine's configuration.
        source: from `open_model`.
        costs: step costs from an earlier start; buckets that save no time on a GPU are left out.
    """
    graphs, scheduler, is_cpu = config.graphs, source.limits, source.device.type == "cpu"
    if graphs.mode is not GraphMode.captured or not source.config.kind.generates:
        return BucketTable(decode_sizes=[], mixed_sizes=[], max_num_seqs=scheduler.max_num_seqs)
    chosen = [size for size in graphs.capture_sizes if size <= scheduler.max_num_seqs]
    if not graphs.capture_sizes:
        chosen = default_decode_sizes(scheduler.max_num_seqs, exact=is_cpu)
    if costs is not None and not is_cpu:
        redundant = redundant_sizes(sorted(chosen), costs)
        chosen = [size for size in chosen if size not in redundant]
    # On a CPU a mixed bucket would cost time for padding and save no launches.
    mixed_sizes = [] if is_cpu else default_mixed_sizes(scheduler.max_num_batched_tokens)
    verify_sizes = {
        tokens: [size for size in chosen if size * tokens <= scheduler.max_num_batched_tokens]
        for tokens in verified_tokens(scheduler.rows_per_seq)
    }
    return BucketTable(
        decode_sizes=chosen,
        mixed_sizes=mixed_sizes,
        max_num_seqs=scheduler.max_num_seqs,
        verify_sizes=verify_sizes,
    )


def plan_measured(
    config: EngineConfig,
    source: ModelSource,
    plan: MemoryPlan,
    table: BucketTable,
    model: LanguageModel,
    buffers: StaticBuffers,
    planner: AttentionPlanner | None,
    token_sampler: GraphSampler,
) -> MemoryPlan:
    """The memory plan with measured sizes, once everything but the KV cache is allocated.

    The weights need not be loaded yet, because a step's allocations do not depend on their values.

    Args:
        config: the engine's configuration.
        source: from `open_model`.
        plan: the plan with estimates.
        table: the buckets that will be captured.
        model: the model, with its memory allocated.
        buffers: the static buffers of the steps.
        planner: the planner of the attention backend; None if it needs none.
        token_sampler: samples on the device.

    Raises:
        StartupError: the engine does not fit into the memory.
    """
    spec = source.kv_cache_spec(config.cache.block_size)

    def largest_step() -> None:
        null_block = spec.allocate(1, source.device)
        runner = GraphRunner(model, null_block, buffers, table=table, planner=planner)
        runner.plan_buckets()
        limits = source.limits
        runner.warm_up(
            [StepSizes(limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_num_rows)]
        )
        token_sampler.run_largest()

    measured = measure(CudaMemory(), largest_step, free_before=plan.free_bytes)
    again = plan_engine(config, source, free_bytes=plan.free_bytes, measured=measured)
    # Static buffers are sized for the first plan's longest sequence.
    return dataclasses.replace(again, max_model_len=min(plan.max_model_len, again.max_model_len))
