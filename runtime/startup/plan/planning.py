"""Plans the buckets and the memory of an engine before the engine is built.

Nothing is allocated, except by `plan_measured`, which runs the largest step once on a CUDA device.
"""

from __future__ import annotations

import dataclasses

from ostinato.conf.engine_config import EngineConfig, draft_config
from ostinato.conf.schema import GraphMode
from ostinato.graphs.buckets import (
    BucketTable,
    default_decode_sizes,
    default_mixed_sizes,
    verified_tokens,
)
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.capture import GraphRunner
from ostinato.graphs.compiler.programs import CAPTURED_TOKENS
from ostinato.graphs.sampling_graph import GraphSampler, num_sampling_graphs
from ostinato.models.base import LanguageModel
from ostinato.models.config.audio_config import AudioEncoderConfig
from ostinato.models.config.vision_config import VisionConfig
from ostinato.models.decoder import Decoder
from ostinato.models.layers.adapter_slots import AdapterSlots
from ostinato.models.layers.mixers.cross_attention_layer import CrossAttention
from ostinato.models.stage_layers import num_bytes
from ostinato.models.step_tensors import StepSizes
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import FRAMES_OF_PAIR
from ostinato.ops.attention import AttentionPlanner, workspace_bytes
from ostinato.ops.parallel.staged_handoff import NUM_SENDING
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import redundant_sizes
from ostinato.runtime.execution.hidden_state_pool import num_pool_slots
from ostinato.runtime.memory.footprint import GraphFootprint, MeasuredMemory, ModelFootprint
from ostinato.runtime.memory.group_choice import describe_groups
from ostinato.runtime.memory.measured_memory import CudaMemory, measure
from ostinato.runtime.memory.memory_plan import GIB, MemoryPlan, free_memory, plan_memory
from ostinato.runtime.sampling.sampler import sampling_bytes
from ostinato.runtime.startup.plan.model_source import ModelSource, model_skeleton
from ostinato.runtime.tiers.tier_calls import device_bytes

__all__ = ("bucket_table", "count_graphs", "plan_engine", "plan_measured")


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
        free_bytes: free memory to plan for; None = the free memory of this GPU or machine.
        measured: measured memory of the device; None = plan with estimates.

    Raises:
        StartupError: the engine does not fit into the memory.
    """
    is_cpu = source.device.type == "cpu"
    keys, num_graphs = bucket_table(config, source).keys, count_graphs(config, source)
    limits = source.limits
    if source.draft is not None:
        num_graphs += count_graphs(draft_config(config), source.draft)
    draft = None if source.draft is None else _draft_footprint(config, source, source.draft)
    there = free_memory(is_cpu=is_cpu).free_bytes if free_bytes is None else free_bytes
    plan = plan_memory(
        dataclasses.replace(
            _footprint(config, source),
            measured=measured,
            draft=draft,
            tier_bytes=_tier_bytes(config, source),
        ),
        free_bytes=_limited(config, there) if free_bytes is None else free_bytes,
        is_cpu=is_cpu,
        device=config.device,
        cache=config.cache,
        scheduler=limits,
        max_model_len=config.model.max_model_len or source.pooling.max_seq_length,
        graphs=GraphFootprint(
            num_graphs=num_graphs,
            max_tokens=max((key.num_tokens for key in keys), default=0),
        ),
    )
    return dataclasses.replace(plan, device_free_bytes=there)


def _tier_bytes(config: EngineConfig, source: ModelSource) -> int:
    """Memory of the device that the copies of KV blocks in slower tiers need on this rank."""
    block_bytes = source.kv_cache_spec(config.cache.block_size).bytes_per_block
    if not (config.cache.has_tiers and block_bytes):
        return 0
    is_cpu = source.device.type == "cpu"
    return device_bytes(block_bytes, is_cpu=is_cpu, has_disk=bool(config.cache.disk_dir))


def count_graphs(config: EngineConfig, source: ModelSource) -> int:
    """The number of graphs that a rank captures on a GPU, on rank 0 also for the sampler."""
    count = len(bucket_table(config, source).keys) * (1 if source.adapters is None else 2)
    if count and source.shard.is_leader:
        count += num_sampling_graphs(source.limits.max_num_rows)
    return count


def _draft_footprint(
    config: EngineConfig, source: ModelSource, draft: ModelSource
) -> ModelFootprint:
    """The sizes of the draft model or the head, with the tables of the model that are copied."""
    footprint = _footprint(draft_config(config), draft)
    if draft.config.head is not None and source.device.type != "cpu":
        # The sum of the hidden states that wait for the head, those of the largest captured step,
        # and the head's features and outputs, which have a row for each token of a step.
        keys = bucket_table(config, source).keys
        num_states = num_pool_slots(source.limits) + max(
            (key.num_tokens for key in keys), default=0
        )
        width = source.head_inputs.width(source.config.hidden_size)
        rows = 2 * draft.limits.max_num_batched_tokens * draft.config.hidden_size
        num_kept = (num_states * width + rows) * source.dtype.itemsize
        workspace = footprint.workspace_bytes + num_kept
        footprint = dataclasses.replace(footprint, workspace_bytes=workspace)
    if draft.tables is None:
        return footprint
    num_copied = num_bytes(model_skeleton(draft.tables))
    weights = footprint.weights_bytes + num_copied
    return dataclasses.replace(footprint, weights_bytes=weights, copied_bytes=num_copied)


def _footprint(config: EngineConfig, source: ModelSource) -> ModelFootprint:
    """The sizes of a model that the memory plan needs."""
    model, limits = source.config, source.limits
    skeleton, unit = model_skeleton(source), source.kv_cache_spec(1)
    stage, recurrent = source.shard.stage, unit.recurrent
    # Each stage after the first has memory for the hidden states of the steps in flight. On a GPU
    # this is memory of the host, so it is not counted. With NCCL or gloo a stage also has a tensor
    # for the states that it receives, and one for those that it sends. With gloo, memory of the
    # machine also holds the states of the steps that wait to be sent.
    num_slots = 0 if stage.is_first or source.device.type != "cpu" else stage.count
    if source.exchange.is_distributed:
        num_slots += (not stage.is_first) + (not stage.is_last)
        num_slots += NUM_SENDING * (not stage.is_last) * (source.device.type == "cpu")
    handoff = num_slots * source.handoff_shape.slot_bytes
    encoding = _encoding_bytes(source)
    return ModelFootprint(
        weights_bytes=num_bytes(skeleton),
        kv_bytes_per_token=unit.bytes_per_token,
        kv_bytes_per_unit=unit.bytes_per_block,
        groups=source.kv_groups,
        group_reason=describe_groups(config, model, source.kv_groups),
        has_states=recurrent is not None,
        state_bytes=0 if recurrent is None else recurrent.bytes_per_slot,
        mixer_bytes=0
        if model.recurrent is None
        else model.recurrent.step_bytes(
            source.dtype.itemsize, source.shard, is_cpu=source.device.type == "cpu"
        ),
        keeps_no_keys=not unit.num_layers and bool(model.attention_windows),
        hidden_size=model.hidden_size,
        # Every rank holds the activations of experts in full width.
        intermediate_size=model.widest_mlp // (1 if model.has_experts else source.shard.size),
        qkv_size=model.qkv_size(source.shard),
        dtype_bytes=source.dtype.itemsize,
        max_model_len=model.max_model_len,
        sampling_bytes=sampling_bytes(limits.max_num_rows, limits.max_num_seqs, model.vocab_size)
        if model.kind.generates and stage.is_last
        else 0,
        adapter_bytes=sum(
            module.num_bytes for module in skeleton.modules() if isinstance(module, AdapterSlots)
        ),
        image_bytes=0 if model.vision is None else _media_bytes(skeleton),
        audio_bytes=_audio_bytes(skeleton),
        sound_bytes=0 if model.sound is None else _media_bytes(skeleton),
        media_table_bytes=_table_bytes(skeleton),
        uncounted=_uncounted(config, source),
        encoding_bytes=encoding,
        workspace_bytes=handoff
        + encoding
        + workspace_bytes(
            config.graphs.attention.value,
            source.attention_spec(config.cache.block_size),
            num_tokens=limits.max_num_batched_tokens,
            num_seqs=limits.max_num_seqs,
            max_model_len=config.model.max_model_len or model.max_model_len,
        )
        if model.kind.needs_kv_cache
        else 0,
    )


def _media_bytes(skeleton: LanguageModel) -> int:
    """Bytes of the tower and of the tables for embeddings of images or sounds on this rank."""
    if not isinstance(skeleton, Decoder):
        return 0
    towers = (skeleton.vision, skeleton.sound)
    return _table_bytes(skeleton) + sum(num_bytes(tower) for tower in towers if tower is not None)


def _table_bytes(skeleton: LanguageModel) -> int:
    """Bytes of the tables for embeddings of images or sounds on this rank."""
    if not isinstance(skeleton, Decoder):
        return 0
    return sum(table.nbytes for table in skeleton.media_tables() if table is not None)


def _uncounted(config: EngineConfig, source: ModelSource) -> str:
    """What the model takes if files say how, and they are missing: images, sounds, or nothing."""
    model = source.config
    if model.vision is not None and source.images is None and config.images.max_per_request:
        return "images"
    if model.sound is not None and source.sounds is None and config.audio.max_per_request:
        return "sounds"
    return ""


def _audio_bytes(skeleton: LanguageModel) -> int:
    """Bytes of the audio tower and of the caches of cross attention on this rank."""
    if not isinstance(skeleton, Decoder) or skeleton.audio is None:
        return 0
    layers = (module for module in skeleton.modules() if isinstance(module, CrossAttention))
    caches = sum(layer.k_cache.nbytes + layer.v_cache.nbytes for layer in layers)
    return caches + num_bytes(skeleton.audio)


def _encoding_bytes(source: ModelSource) -> int:
    """Memory for encoding the largest image, tile or pair of frames, or a window of audio."""
    vision, images, config = source.config.vision, source.images, source.config
    if config.audio is not None:
        return _bytes_of_window(source, config.audio)
    if config.sound is not None and source.sounds is not None:
        sound = config.sound
        # The means and their norms, the values between the projector's matrices, and the result,
        # twice.
        values = 2 * sound.encoder.hidden_size + 3 * sound.output_size
        result = source.sounds.max_window_tokens * values * source.dtype.itemsize
        return _bytes_of_window(source, sound.encoder) + result
    if vision is None or images is None:
        return 0
    one = _bytes_of_image(source, vision, images, images.max_encoded_tokens)
    pair = _bytes_of_image(source, vision, images, images.max_pair_tokens, FRAMES_OF_PAIR)
    return max(one, pair)


def _bytes_of_window(source: ModelSource, audio: AudioEncoderConfig) -> int:
    """Memory for computing the states of a window of audio."""
    # As below, for each position, and a spectrogram in float32 of two frames for each position. The
    # first convolution has two results for each position, and three times its inputs.
    values = 9 * audio.hidden_size + 3 * audio.intermediate_size
    values += 8 * audio.hidden_size + 8 * audio.num_bins
    num_values = audio.num_positions * values
    return source.dtype.itemsize * num_values + 8 * audio.num_positions * audio.num_bins


def _bytes_of_image(
    source: ModelSource,
    vision: VisionConfig,
    images: ImageSpec,
    num_tokens: int,
    num_frames: int = 1,
) -> int:
    """Memory for encoding an image or a pair of frames with so many embeddings."""
    # For each patch: hidden states before and after a layer, norms, queries, keys, values and
    # results of attention, the values of an MLP, and colours and rotary tables in float32. Then the
    # result, twice.
    num_patches = num_tokens * images.merge_size**2
    values = 9 * vision.hidden_size + 3 * vision.intermediate_size
    floats = 2 * vision.head_dim + 6 * num_frames * images.patch_size**2
    result = 2 * num_tokens * (1 + vision.num_deep) * vision.output_size
    num_bytes = source.dtype.itemsize * (num_patches * values + result)
    return num_bytes + 4 * num_patches * floats


def _limited(config: EngineConfig, free_bytes: int) -> int:
    """The free memory of the GPU or of the machine; device.memory_gib if that is less."""
    limit_gib = config.device.memory_gib
    return free_bytes if limit_gib is None else min(free_bytes, int(limit_gib * GIB))


def bucket_table(
    config: EngineConfig, source: ModelSource, costs: CostTable | None = None
) -> BucketTable:
    """The buckets to capture.

    The table is empty without graphs.mode=captured. On a CPU every number of decodes has a bucket,
    because buckets cost nothing there; graphs.capture_sizes chooses fewer. The steps of an encoder
    rarely have the same shape twice, so an encoder has no bucket on a GPU. On a CPU it has one
    bucket: its layers are recorded for all steps of up to `CAPTURED_TOKENS` tokens.

    Args:
        config: the engine's configuration.
        source: from `open_model`.
        costs: step costs from an earlier start. By these, buckets that save no time on a GPU are
            left out. None = all buckets.
    """
    graphs, scheduler, is_cpu = config.graphs, source.limits, source.device.type == "cpu"
    if graphs.mode is not GraphMode.captured:
        return BucketTable(decode_sizes=[], mixed_sizes=[], max_num_seqs=scheduler.max_num_seqs)
    if not source.config.kind.generates:
        sizes = [min(CAPTURED_TOKENS, scheduler.max_num_batched_tokens)] if is_cpu else []
        return BucketTable(decode_sizes=[], mixed_sizes=sizes, max_num_seqs=scheduler.max_num_seqs)
    chosen = [size for size in graphs.capture_sizes if size <= scheduler.max_num_seqs]
    if not graphs.capture_sizes:
        chosen = default_decode_sizes(scheduler.max_num_seqs, exact=is_cpu)
    if costs is not None and not is_cpu:
        redundant = redundant_sizes(sorted(chosen), costs)
        chosen = [size for size in chosen if size not in redundant]
    # On a CPU a mixed bucket would cost time for padding and save no launches.
    mixed_sizes = [] if is_cpu else default_mixed_sizes(scheduler.max_num_batched_tokens)
    most = min(scheduler.max_num_batched_tokens, scheduler.max_num_rows)
    verify_sizes = {
        tokens: [size for size in chosen if size * tokens <= most]
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
    token_sampler: GraphSampler | None,
) -> MemoryPlan:
    """The memory plan with measured sizes. Called when all but the KV cache is allocated.

    The weights need not be loaded yet, because a step's allocations do not depend on their values.

    Args:
        config: the engine's configuration.
        source: from `open_model`.
        plan: the plan with estimates.
        table: the buckets that will be captured.
        model: the model, with its memory allocated.
        buffers: the static buffers of the steps.
        planner: the planner of the attention backend; None if it needs none.
        token_sampler: samples on the device; None = this rank does not sample.

    Raises:
        StartupError: the engine does not fit into the memory.
    """
    spec = source.kv_cache_spec(config.cache.block_size)

    def largest_step() -> None:
        null_block = spec.allocate(1, source.device, num_states=1)
        runner = GraphRunner(model, null_block, buffers, table=table, planner=planner)
        runner.plan_buckets()
        limits = source.limits
        runner.warm_up(
            [StepSizes(limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_num_rows)]
        )
        if token_sampler is not None:
            token_sampler.run_largest()

    # The limit device.memory_gib is no free memory: the device's is compared with the device's.
    measured = measure(CudaMemory(), largest_step, free_before=plan.device_free_bytes)
    again = plan_engine(config, source, free_bytes=plan.free_bytes, measured=measured)
    # Static buffers are sized for the first plan's longest sequence.
    return dataclasses.replace(
        again,
        max_model_len=min(plan.max_model_len, again.max_model_len),
        device_free_bytes=plan.device_free_bytes,
    )
