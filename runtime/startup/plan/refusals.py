"""Refuses settings that a model or another setting does not support. Each error is one line."""

from __future__ import annotations

import torch

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import GraphForm, GraphMode
from ostinato.conf.sections.server_schema import ExchangeName
from ostinato.conf.sections.speculation_schema import SpeculationMethod
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.decoder import Decoder
from ostinato.models.registry import class_of
from ostinato.models.sharding import Shard
from ostinato.models.weight_policy import WeightPolicy
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import free_host_memory
from ostinato.runtime.memory.memory_plan import GIB

__all__ = (
    "check_cache_scales",
    "check_division",
    "check_speculation",
    "check_tiers",
    "why_no_draft",
)


def check_cache_scales(
    config: EngineConfig, model: ModelConfig, weights: WeightPolicy, cache_dtype: torch.dtype
) -> None:
    """Refuse a float8 cache if the checkpoint has scales for it that the model does not use.

    Raises:
        StartupError: it has such scales.
    """
    if cache_dtype is not torch.float8_e4m3fn or not weights.has_cache_scales:
        return
    # Only `Attention` (models/layers/mixers/attention_layer.py) divides by the scales.
    family = class_of(model)
    if not issubclass(family, Decoder) or model.latent is not None:
        raise StartupError(
            f"cache.dtype={config.cache.dtype}, but the checkpoint has scales of its own for "
            f"keys and values (k_scale, v_scale), which {family.__name__} does not use; set "
            "cache.dtype=auto"
        )


def check_speculation(config: EngineConfig, model: ModelConfig, limits: StepLimits) -> None:
    """Refuse drafts if the model does not support them or a step is too small.

    Raises:
        StartupError: the model does not generate, or a step has fewer tokens than a draft.
    """
    method, max_tokens = config.speculation.drafter, config.speculation.max_tokens
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


def why_no_draft(model: ModelConfig) -> str | None:
    """Why a model cannot draft for any other model; None if it can."""
    if not model.kind.generates:
        return f"{model.architecture} does not generate"
    for what, is_so in (
        ("takes images, and a draft model sees none", model.vision),
        ("takes audio, and a draft model hears none", model.audio or model.sound),
        ("has recurrent layers, and a draft model keeps no states", model.recurrent),
    ):
        if is_so is not None:
            return f"{model.architecture} {what}"
    return None


def check_tiers(
    config: EngineConfig, model: ModelConfig, device: torch.device, *, is_here: bool
) -> None:
    """Refuse copies of KV blocks that a model, a device or this machine has no room for.

    Args:
        config: the engine's configuration.
        model: the model.
        device: its device.
        is_here: whether the device is in this machine.

    Raises:
        StartupError: the model keeps no keys and values or has recurrent layers, ranks are on
            several machines, host memory is the device's memory, or host memory is too small.
    """
    cache = config.cache
    host_key = f"cache.host_gib={cache.host_gib:g}"
    key = f"cache.disk_dir={cache.disk_dir}" if cache.disk_dir else host_key
    if cache.has_tiers and not model.kind.needs_kv_cache:
        raise StartupError(
            f"{key} is for models that keep keys and values, and {model.architecture} does not; "
            "leave it out"
        )
    if cache.has_tiers and model.recurrent is not None:
        raise StartupError(
            f"{key} copies KV blocks, and {model.architecture} has recurrent layers, whose states "
            "are not copied; leave it out"
        )
    if cache.disk_dir and config.parallel.machines_per_engine > 1:
        raise StartupError(
            f"cache.disk_dir={cache.disk_dir} is for engines on one machine, and an engine has "
            f"ranks on {config.parallel.machines_per_engine}: another machine can have other "
            "weights; leave it out"
        )
    if cache.host_gib and device.type == "cpu":
        raise StartupError(
            f"{host_key} is for GPUs: a CPU's KV cache is in host memory already; raise "
            "cache.memory_gib, or set cache.disk_dir"
        )
    if cache.host_gib and is_here:
        free_gib = free_host_memory().free_bytes / GIB
        if cache.host_gib / config.parallel.machines_per_engine > free_gib:
            raise StartupError(
                f"{host_key} is more than the {free_gib:.1f} GiB of free host memory; lower it"
            )


def check_division(config: EngineConfig, device: torch.device, shard: Shard) -> None:
    """Refuse ranks and stages together with a device or a setting that does not support them.

    Raises:
        StartupError: the device or a setting does not support ranks or stages.
    """
    parallel = config.parallel
    if parallel.exchange is ExchangeName.gloo and device.type != "cpu":
        raise StartupError(
            f"parallel.exchange=gloo is for CPUs, and the model runs on {device.type}; set "
            "parallel.exchange=auto, which is NCCL on GPUs"
        )
    if shard.stage.count == 1:
        return
    key = f"parallel.pipeline={shard.stage.count}"
    if config.graphs.form is not GraphForm.layer and config.graphs.mode is not GraphMode.eager:
        raise StartupError(
            f"graphs.form={config.graphs.form} compiles the model as a whole, and {key} divides "
            "its layers among stages; set graphs.form=layer or parallel.pipeline=1"
        )
