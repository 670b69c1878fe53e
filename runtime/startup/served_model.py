"""Describes the served model for clients: name, context length, tokenizer, tasks."""

from __future__ import annotations

import time
from pathlib import Path

from ostinato.conf.schema import ModelSection, PoolingChoice, SamplingSection
from ostinato.models.checkpoints.checkpoint import resolve_directory
from ostinato.runtime.memory.memory_plan import MemoryPlan
from ostinato.runtime.startup.planning import ModelSource
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.params import PoolingKind

__all__ = ("describe_model", "model_name")

# generation_config.json's fields that are defaults of a request.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def describe_model(
    section: ModelSection,
    sampling: SamplingSection,
    source: ModelSource,
    plan: MemoryPlan,
    phases: dict[str, float],
    isa: str,
) -> ServedModel:
    """The facts about the model that the API shows, and checks requests against.

    Args:
        section: the configuration of the model.
        sampling: whether the model's own defaults count.
        source: what was opened.
        plan: knows the context's length.
        phases: seconds of the start's parts; still grows while the engine is built.
        isa: instruction set of the CPU kernels; empty = none are used.
    """
    directory = source.checkpoint.directory
    generation = source.checkpoint.generation_config
    defaults = {
        key: generation[key]
        for key in _SAMPLING_DEFAULTS
        if sampling.use_generation_config and generation.get(key) is not None
    }
    if generation.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    # Dummy weights without a directory use the demo model's tokenizer: resolve_directory("").
    tokenizer = directory
    if section.tokenizer or directory is None:
        tokenizer = resolve_directory(
            section.tokenizer, section.revision, weights=False, key="model.tokenizer"
        )
    return ServedModel(
        name=model_name(section, directory),
        max_model_len=plan.max_model_len,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.config.eos_token_ids,
        tokenizer=str(tokenizer),
        default_sampling=defaults,
        created=int(time.time()),
        startup_seconds=phases,
        isa=isa,
        tasks=_tasks(source),
        embedding_size=source.config.hidden_size,
        pooling=_pooling(section, source),
        normalize=source.pooling.normalize,
        num_labels=source.config.num_labels,
        has_kv_cache=source.config.kind.needs_kv_cache,
        num_segments=source.config.num_segments,
    )


def _tasks(source: ModelSource) -> tuple[ServedTask, ...]:
    if source.config.num_labels:
        return (ServedTask.classify,)
    if not source.config.kind.generates:
        return (ServedTask.embed,)
    return (ServedTask.generate, ServedTask.embed)


def _pooling(section: ModelSection, source: ModelSource) -> PoolingKind:
    """The pooling mode: as configured, else the checkpoint's, else the usual one."""
    if source.config.num_labels:
        return PoolingKind.cls  # the hidden state that the classification head reads
    stated = source.pooling.mode
    if section.pooling is not PoolingChoice.auto:
        stated = section.pooling.value
    return PoolingKind(stated or source.config.kind.default_pooling)


def model_name(section: ModelSection, directory: Path | None) -> str:
    """The name of the served model: as configured, else the last part of its path."""
    if section.name:
        return section.name
    if not section.path:
        return "ostinato-demo" if directory is not None else "dummy"
    return Path(section.path).name if Path(section.path).is_dir() else section.path
