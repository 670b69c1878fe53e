"""Finds the model of an engine and its draft model, and checks them against the configuration.

Weights are not read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ostinato.conf.engine_config import EngineConfig, draft_config
from ostinato.conf.schema import ExpertKernels, GraphForm, GraphMode, LoadFormat, PoolingChoice
from ostinato.conf.sections.server_schema import ExchangeName
from ostinato.conf.sections.speculation_schema import (
    NO_DRAFTS,
    SpeculationConfig,
    SpeculationMethod,
)
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.models.base import LanguageModel
from ostinato.models.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    resolve_path,
)
from ostinato.models.checkpoints.pooling_files import PoolingFiles, read_pooling_files
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.head_spec import NO_INPUTS, HeadInputs, HeadSpec, NextTokenSpec
from ostinato.models.config.model_config import ModelConfig, resolve_cache_dtype, resolve_dtype
from ostinato.models.decoder import Decoder
from ostinato.models.draft_heads.draft_head_model import shard_of_tables
from ostinato.models.draft_heads.eagle3 import is_head_config, read_head_config
from ostinato.models.draft_heads.next_token import read_next_token_config
from ostinato.models.kv_cache import CrossSpace, KVCacheSpec
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.models.layers.adapter_slots import AdapterSpace
from ostinato.models.registry import build_model, class_of, read_model_config
from ostinato.models.sharding import WHOLE, Shard
from ostinato.models.stage_layers import with_layers
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.weight_policy import WeightPolicy
from ostinato.ops.attention import AttentionSpec
from ostinato.ops.parallel.exchange import Exchange
from ostinato.ops.parallel.handoff import HiddenShape
from ostinato.runtime.costs.step_limits import StepLimits, upper_limits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.memory.group_choice import choose_groups, draft_groups
from ostinato.runtime.startup.bundles import compression
from ostinato.runtime.startup.plan.adapter_space import adapter_space
from ostinato.runtime.startup.plan.audio_source import cross_space, read_audio
from ostinato.runtime.startup.plan.default_drafts import with_default_drafts
from ostinato.runtime.startup.plan.device import resolve_device
from ostinato.runtime.startup.plan.image_source import (
    count_media_rows,
    limits_for_images,
    read_images,
)
from ostinato.runtime.startup.plan.refusals import (
    check_cache_scales,
    check_division,
    check_speculation,
    why_no_draft,
)
from ostinato.runtime.startup.plan.sound_source import count_sound_rows, read_sounds
from ostinato.runtime.text.vocabulary import vocabulary_difference

__all__ = ("ModelSource", "model_skeleton", "open_model", "part_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model whose configuration has been read, and whose weights have not been loaded."""

    checkpoint: Checkpoint
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype  # the dtype of weights and activations
    cache_dtype: torch.dtype  # the dtype of keys and values in the cache
    limits: StepLimits  # the limits that buffers, buckets and memory are sized for
    pooling: PoolingFiles  # the pooling that the checkpoint states
    weights: WeightPolicy  # how each matrix is stored and multiplied
    shard: Shard = WHOLE  # the part of the model that this rank holds
    exchange: Exchange = Exchange.shared_memory  # how the ranks exchange values
    # The draft model or the head of speculation.model. Only rank 0, the leader, has it, and holds
    # all of it.
    draft: ModelSource | None = None
    # Set for a head, if the leader's part of the model lacks rows of the embedding or of the output
    # head. The leader then holds copies of these tables. None = no copies.
    tables: ModelSource | None = None
    head_inputs: HeadInputs = NO_INPUTS  # the hidden states of this model that its head reads
    speculation: SpeculationConfig = NO_DRAFTS  # the section with `method` set
    adapters: AdapterSpace | None = None  # the room for low-rank adapters; None = no room
    images: ImageSpec | None = None  # how the model takes images; None = it takes none
    num_media_rows: int = 0  # embeddings of images or sounds that can be kept at once
    audio: AudioSpec | None = None  # how the model transcribes audio; None = it does not
    sounds: SoundSpec | None = None  # how the model takes sounds; None = it takes none
    cross: CrossSpace | None = None  # the room for keys and values that cross attention reads
    kv_groups: tuple[KVGroup, ...] = WHOLE_CACHE  # those of the whole model, on every rank the same

    def attention_spec(self, block_size: int) -> AttentionSpec:
        """The requirements of the model on an attention backend."""
        return self.config.attention_spec(
            block_size,
            self.dtype,
            self.device,
            cache_dtype=self.cache_dtype,
            shard=self.shard,
        )

    @property
    def has_cache_scales(self) -> bool:
        """Whether the cache uses the checkpoint's scales of keys and values. Only a float8 cache
        can."""
        return self.cache_dtype is torch.float8_e4m3fn and self.weights.has_cache_scales

    @property
    def handoff_shape(self) -> HiddenShape:
        """The shape of the hidden states that one pipeline stage hands to the next, at most."""
        limits, num_states = self.limits, 1 + len(self.head_inputs.layers)
        return HiddenShape(
            limits.max_num_batched_tokens, self.config.hidden_size, self.dtype, num_states
        )

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """The shapes of the KV cache on this rank."""
        dtype, groups = self.cache_dtype, self.kv_groups
        return self.config.kv_cache_spec(
            block_size, dtype, activation_dtype=self.dtype, shard=self.shard, groups=groups
        )


def open_model(
    config: EngineConfig,
    device: torch.device | None = None,
    *,
    max_drafts: int | None = None,
    shard: Shard = WHOLE,
    head_inputs: HeadInputs = NO_INPUTS,
) -> ModelSource:
    """Find the model and read its configuration; loads no weights.

    Args:
        config: the engine's configuration.
        device: a device to plan for, which need not exist; None = the configured device.
        max_drafts: draft tokens of one sequence in one step, at most; 0 = no drafter, None = as
            configured.
        shard: the part of the model that this rank holds. This function sets the layers of its
            stage.
        head_inputs: on ranks after the first, the `head_inputs` of the leader's source.

    Raises:
        StartupError: there is no such model, the model or a setting is not supported, or the model
            cannot be divided among the configured ranks or stages.
    """
    try:
        checkpoint = open_checkpoint(config.model)
        model_config = read_model_config(checkpoint, config.model.implementation)
        pooling = read_pooling_files(checkpoint.path)
    except ValueError as error:
        raise StartupError(str(error)) from error
    if pooling.unsupported is not None and config.model.pooling is PoolingChoice.auto:
        raise StartupError(f"{pooling.unsupported}; choose a pooling with model.pooling")
    dtype = resolve_dtype(config.model.dtype, model_config)
    device = device or resolve_device(config.device.name)
    is_cpu = device.type == "cpu"
    exchange = _exchange(config, device)
    check_division(config, device, shard)
    weights = _choose_weights(config, checkpoint, device, dtype)
    config = with_default_drafts(config, model_config, weights, is_cpu=is_cpu)
    max_drafts = config.speculation.max_drafts if max_drafts is None else max_drafts
    limits = upper_limits(config.scheduler, is_cpu=is_cpu, max_drafts=max_drafts)
    check_speculation(config, model_config, limits)
    length = config.model.max_model_len or pooling.max_seq_length or model_config.max_model_len
    if model_config.kind.takes_whole_prompts:
        limits = _encoder_limits(config, limits, length)
    images = read_images(config, checkpoint, model_config)
    limits = limits_for_images(config, limits, model_config, images)
    sounds = read_sounds(config, checkpoint, model_config)
    cache_dtype = resolve_cache_dtype(config.cache.dtype, dtype)
    check_cache_scales(config, model_config, weights, cache_dtype)
    source = ModelSource(
        checkpoint=checkpoint,
        config=model_config,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        limits=limits,
        pooling=pooling,
        weights=weights,
        exchange=exchange,
        speculation=config.speculation,
        head_inputs=head_inputs,
        adapters=adapter_space(config, model_config),
        images=images,
        num_media_rows=count_media_rows(config, images) + count_sound_rows(config, sounds),
        audio=read_audio(config, checkpoint, model_config),
        sounds=sounds,
        cross=cross_space(config, model_config, cache_dtype),
        kv_groups=choose_groups(config, model_config, length),
    )
    source = part_of(source, shard)
    if not config.speculation.uses_model or not shard.is_leader:
        return source
    return _with_draft(source, _open_draft(config, source))


def part_of(source: ModelSource, shard: Shard) -> ModelSource:
    """The part of a model that a rank holds, with the layers of its stage.

    Raises:
        StartupError: the model cannot be divided among this number of ranks or stages.
    """
    for key, number, reason in (
        ("tensor", shard.size, source.config.why_unshardable(shard.size)),
        ("pipeline", shard.stage.count, source.config.why_unstageable(shard.stage.count)),
    ):
        if reason is not None:
            raise StartupError(f"parallel.{key}={number}: {reason}")
    draft = source.draft
    source = dataclasses.replace(source, shard=Shard(shard.rank, shard.size), draft=None)
    if shard.stage.count > 1:
        source = dataclasses.replace(source, shard=with_layers(shard, model_skeleton(source)))
    return source if draft is None or not shard.is_leader else _with_draft(source, draft)


def _with_draft(source: ModelSource, draft: ModelSource) -> ModelSource:
    """The leader's part of a model, with its draft model or its head.

    The draft model keeps all tokens, in the blocks of the model's first group.
    """
    spec = draft.config.head
    if spec is not None:
        needs_logits = isinstance(spec, NextTokenSpec)
        shard = shard_of_tables(source.shard, source.config, needs_logits=needs_logits)
        tables = None
        if shard is not None:
            tables = dataclasses.replace(
                source, shard=shard, images=None, sounds=None, num_media_rows=0
            )
        draft = dataclasses.replace(draft, tables=tables)
    inputs = NO_INPUTS if spec is None else spec.inputs(source.config.num_layers)
    draft = dataclasses.replace(draft, kv_groups=draft_groups(source.kv_groups))
    return dataclasses.replace(source, draft=draft, head_inputs=inputs)


def _open_draft(config: EngineConfig, target: ModelSource) -> ModelSource:
    """The draft model, or the head.

    Raises:
        StartupError: the draft model does not exist, is not supported, or cannot draft for the
            target.
    """
    path, method = config.speculation.model, config.speculation.drafter
    key = f"speculation.model={path}" if path else f"speculation.method={method}"
    if method is SpeculationMethod.mtp:
        return _open_next_token_layer(config, target)
    own, is_head = draft_config(config), method is SpeculationMethod.eagle3
    what = "head" if is_head else "draft model"
    try:
        resolve_path(path, weights=False, key="speculation.model")
        if method is SpeculationMethod.auto:
            is_head = is_head_config(open_checkpoint(own.model).hf_config)
            what = "head" if is_head else "draft model"
        draft = _open_head(own, target) if is_head else open_model(own, target.device)
    except CheckpointError as error:
        raise StartupError(str(error)) from error
    except StartupError as error:
        raise StartupError(f"{key} cannot be the {what}: {error}") from error
    reason = _why_no_head(config, draft, target) if is_head else why_no_draft(draft.config)
    if reason is None:
        reason = _why_other_vocabulary(config, draft, target)
    if reason is not None:
        raise StartupError(f"{key} cannot be the {what}: {reason}")
    return draft


def _open_head(config: EngineConfig, target: ModelSource) -> ModelSource:
    """An EAGLE-3 head, which computes in the target's dtype.

    Args:
        config: from `draft_config`.
        target: the model.

    Raises:
        StartupError: the checkpoint is not a head, or a value of its config is not supported.
    """
    checkpoint = open_checkpoint(config.model)
    try:
        model_config = read_head_config(checkpoint.hf_config)
        pooling = read_pooling_files(checkpoint.path)
    except ValueError as error:
        raise StartupError(str(error)) from error
    return ModelSource(
        checkpoint=checkpoint,
        config=model_config,
        device=target.device,
        dtype=target.dtype,
        cache_dtype=target.cache_dtype,
        limits=_limits_of_head(config, target),
        pooling=pooling,
        weights=_choose_weights(config, checkpoint, target.device, target.dtype),
    )


def _open_next_token_layer(config: EngineConfig, target: ModelSource) -> ModelSource:
    """The next-token layer (multi-token prediction) of the model's own checkpoint.

    Raises:
        StartupError: the checkpoint has no such layer, or the model's compiled programs do not
            return hidden states.
    """
    key = "speculation.method=mtp"
    try:
        layer = read_next_token_config(target.checkpoint, target.config)
    except ValueError as error:
        raise StartupError(f"{key}: {error}") from error
    if (reason := _why_hidden(config)) is not None:
        raise StartupError(f"{key}: {reason}")
    limits = _limits_of_head(config, target)
    return dataclasses.replace(target, config=layer, limits=limits, shard=WHOLE, adapters=None)


def _limits_of_head(config: EngineConfig, target: ModelSource) -> StepLimits:
    return upper_limits(config.scheduler, is_cpu=target.device.type == "cpu", max_drafts=0)


def _why_hidden(config: EngineConfig) -> str | None:
    """Why the model's compiled programs do not return hidden states; None if they do."""
    if config.graphs.form is GraphForm.layer or config.graphs.mode is GraphMode.eager:
        return None
    return (
        f"graphs.form={config.graphs.form} compiles the model as one function, which shows no "
        "hidden states; set graphs.form=layer"
    )


def _why_no_head(config: EngineConfig, head: ModelSource, target: ModelSource) -> str | None:
    """Why an EAGLE-3 head cannot draft for the target; None if it can."""
    spec, model = head.config.head, target.config
    assert isinstance(spec, HeadSpec), "the head was read as one"
    if not issubclass(class_of(model), Decoder):
        return f"{model.architecture} runs through transformers, which shows no hidden states"
    if model.recurrent is not None:
        return (
            f"{model.architecture} has recurrent layers, and computes right drafts before a "
            "refused one again; a head reads the hidden states of a token only once"
        )
    if (reason := _why_hidden(config)) is not None:
        return reason
    if (reason := spec.why_not_for(model.num_layers, model.hidden_size)) is not None:
        return f"it was trained for another model: {reason}"
    if head.config.hidden_size != model.hidden_size:
        return (
            f"its hidden size is {head.config.hidden_size}, and the model's is {model.hidden_size}"
            "; a head reads the model's embeddings"
        )
    return None


def _why_other_vocabulary(
    config: EngineConfig, draft: ModelSource, target: ModelSource
) -> str | None:
    """How the vocabulary of a draft model differs from the target's; None = no known difference."""
    sizes = draft.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        return f"its vocabulary has {sizes[0]} tokens, and the model's has {sizes[1]}"
    if config.model.load_format is LoadFormat.dummy or config.model.tokenizer:
        return None
    paths = draft.checkpoint.path, target.checkpoint.path
    if paths[0] is None or paths[1] is None:
        return None
    return vocabulary_difference(paths[0], paths[1])


def _exchange(config: EngineConfig, device: torch.device) -> Exchange:
    """What carries values between the ranks."""
    if device.type != "cpu":
        return Exchange.nccl
    is_gloo = config.parallel.exchange is ExchangeName.gloo
    return Exchange.gloo if is_gloo else Exchange.shared_memory


def _choose_weights(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> WeightPolicy:
    """Choose the weight method of each matrix.

    Raises:
        StartupError: no kernel supports the quantization with this device, dtype or setting.
    """
    packing = {"pack": config.graphs.pack_weights, "compress": compression(config)}
    try:
        return choose_weights(config.model, checkpoint, **packing, device=device, dtype=dtype)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _encoder_limits(config: EngineConfig, limits: StepLimits, max_model_len: int) -> StepLimits:
    """The limits of an encoder's steps. A step must have room for a whole text.

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


def model_skeleton(
    source: ModelSource, experts: ExpertKernels = ExpertKernels.auto
) -> LanguageModel:
    """The model of this rank on the meta device: it shows the sizes of weights and has no memory.

    Raises:
        ValueError: the kernels for experts that `experts` names do not support the model's experts.
        StartupError: the settings do not fit a quantised matrix, or it cannot be divided among this
            number of ranks.
    """
    try:
        return build_model(
            source.config,
            dtype=source.dtype,
            device=torch.device("meta"),
            attention_backend="reference",
            weights=source.weights,
            shard=source.shard,
            exchange=source.exchange,
            experts=experts,
            adapters=source.adapters,
            num_media_rows=source.num_media_rows,
            cross=source.cross,
        )
    except ValueError as error:
        if experts is not ExpertKernels.auto:
            raise
        where = f"parallel.tensor={source.shard.size}: " if source.shard.size > 1 else ""
        raise StartupError(f"{where}{error}") from error
