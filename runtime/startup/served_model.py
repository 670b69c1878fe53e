"""Describes the served model for clients: name, context length, tokenizer, tasks."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from ostinato.conf.schema import LoadFormat, ModelSection, PoolingChoice
from ostinato.models.base import LanguageModel
from ostinato.models.checkpoints.checkpoint import resolve_path
from ostinato.models.decoder import Decoder
from ostinato.models.gguf.gguf_paths import GGUF_ENDING, is_gguf_path
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.runtime.startup.isa_trial import describe_times
from ostinato.runtime.startup.plan.engine_plan import EnginePlan
from ostinato.runtime.startup.plan.identity import compute_identity, isa_of
from ostinato.runtime.startup.plan.model_source import ModelSource
from ostinato.runtime.text.tokenizer_files import TokenizerFiles
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.params import PoolingKind

__all__ = (
    "describe_float_head",
    "describe_kernels",
    "describe_model",
    "model_name",
    "tokenizer_and_ends",
)

_LARGE_HEAD = 0.25  # of the bytes of the weights that a decode step reads
_END_BYTES = 4096  # the fingerprint covers this many bytes at the end of each weight file
# Fields of generation_config.json that are defaults of a request.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def describe_kernels(plan: EnginePlan) -> str:
    """The instruction set of the CPU kernels with its measured times; empty = none are used."""
    isa = isa_of(plan)
    return describe_times(isa, _isa_times(plan)) if isa else ""


def describe_float_head(plan: EnginePlan, network: LanguageModel) -> str:
    """The share of a head of floats in a quantised model's weights; empty if it is small.

    Of experts, a decode step reads an unknown part, so models with experts have no such text.
    """
    source = plan.source
    if (
        not isinstance(network, Decoder)
        or source.config.has_experts
        or source.shard.stage.count > 1
    ):
        return ""
    head = network.embed_tokens if network.lm_head is None else network.lm_head
    if head is None or head.method.is_quantized or source.weights.quantization == "none":
        return ""
    read = (
        module
        for module in network.modules()
        if isinstance(module, LinearBase) and (module is head or module is not network.embed_tokens)
    )
    num_bytes = sum(weight.nbytes for module in read for weight in module.weights.values())
    share = sum(weight.nbytes for weight in head.weights.values()) / num_bytes
    if share < _LARGE_HEAD:
        return ""
    return (
        f"the output head has floats, {share:.0%} of the weights that a decode step reads: "
        "model.quantization_head=int8 rounds it to 8 bits"
    )


def _isa_times(plan: EnginePlan) -> dict[str, dict[str, float]]:
    return {} if plan.isa_trial is None else plan.isa_trial.microseconds


def describe_model(plan: EnginePlan, phases: dict[str, float]) -> ServedModel:
    """The facts about the model that the API shows. The API also checks requests by them.

    Args:
        plan: the engine's plan.
        phases: seconds of each phase of the start. The builder adds phases after this call.
    """
    section, source, isa = plan.config.model, plan.source, isa_of(plan)
    path = source.checkpoint.path
    generation = source.checkpoint.generation_config
    defaults: dict[str, Any] = {}
    if plan.config.sampling.use_generation_config:
        given = ((key, generation.get(key)) for key in _SAMPLING_DEFAULTS)
        defaults = {key: value for key, value in given if value is not None}
        if generation.get("do_sample") is False:
            defaults["temperature"] = 0.0
    tokenizer, eos_token_ids = tokenizer_and_ends(plan)
    return ServedModel(
        name=model_name(section, path),
        max_model_len=plan.memory.max_model_len,
        vocab_size=source.config.vocab_size,
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
        architecture=source.config.architecture,
        default_sampling=defaults,
        created=int(time.time()),
        startup_seconds=phases,
        isa=isa,
        isa_microseconds=_isa_times(plan),
        determinism=plan.determinism,
        system_fingerprint=_fingerprint(plan, isa),
        tasks=_tasks(source),
        embedding_size=source.config.hidden_size,
        pooling=_pooling(section, source),
        normalize=source.pooling.normalize,
        num_labels=source.config.num_labels,
        has_kv_cache=source.config.kind.needs_kv_cache,
        num_segments=source.config.num_segments,
        speculates=source.limits.rows_per_seq > 1,
        block_size=plan.config.cache.block_size if source.config.kind.needs_kv_cache else 0,
        images=source.images,
        media_cache_tokens=source.num_media_rows,
        audio=source.audio,
        sounds=source.sounds,
        audio_windows=0 if source.cross is None else source.cross.num_windows,
    )


def tokenizer_and_ends(plan: EnginePlan) -> tuple[str, tuple[int, ...]]:
    """The directory or GGUF file of the tokenizer, and the tokens that end a sequence."""
    section, path = plan.config.model, plan.source.checkpoint.path
    # Dummy weights without a path use the demo model's tokenizer: resolve_path("").
    tokenizer = path
    has_tokenizer = bool(section.tokenizer) or path is not None
    if section.tokenizer or path is None:
        tokenizer = resolve_path(
            section.tokenizer, section.revision, weights=False, key="model.tokenizer"
        )
    ends = _eos_token_ids(plan.source, tokenizer if has_tokenizer else None)
    return str(tokenizer), ends


def _eos_token_ids(source: ModelSource, tokenizer: Path | None) -> tuple[int, ...]:
    """The tokens that end a sequence: from the model's configuration, and from its tokenizer.

    A chat model that was trained further can end its turns with a token that only its tokenizer
    names. The demo tokenizer, which dummy weights without a path use, does not count.
    """
    own = None if tokenizer is None else TokenizerFiles(tokenizer).eos_token_id()
    ids = (*source.config.eos_token_ids, *(() if own is None else (own,)))
    # A model cannot give an id outside of its vocabulary, and `min_tokens` cannot mask it.
    return tuple(dict.fromkeys(one for one in ids if 0 <= one < source.config.vocab_size))


def _fingerprint(plan: EnginePlan, isa: str) -> str:
    """A digest of what an answer depends on besides the request.

    Two engines with equal fingerprints that contain `bitwise` give bitwise equal logits. Of a
    weight file, the digest covers the name, the size and the last 4096 bytes. The number of threads
    and the limits of steps are not part of the fingerprint.
    """
    digest = hashlib.sha256()
    for part in compute_identity(plan).values():
        digest.update(part.encode() + b"\0")
    digest.update(f"{plan.memory.max_model_len}".encode())
    if plan.config.model.load_format is not LoadFormat.dummy:
        for file in plan.source.checkpoint.weight_files():
            digest.update(f"{file.name} {file.stat().st_size}".encode() + _end_of(file))
    return "-".join(filter(None, ("fp", plan.determinism, isa, digest.hexdigest()[:12])))


def _end_of(file: Path) -> bytes:
    """The last bytes of a weight file. Reading the whole file would take as long as loading it."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _END_BYTES))
        return opened.read()


def _tasks(source: ModelSource) -> tuple[ServedTask, ...]:
    if source.config.audio is not None:
        return (ServedTask.transcribe,)
    if source.config.num_labels:
        return (ServedTask.classify,)
    if not source.config.kind.generates:
        return (ServedTask.embed,)
    return (ServedTask.generate, ServedTask.embed)


def _pooling(section: ModelSection, source: ModelSource) -> PoolingKind:
    """The pooling mode: as configured, else the checkpoint's, else the model kind's.

    A model with a classification head always has `cls`.
    """
    if source.config.num_labels:
        return PoolingKind.cls  # the hidden state that the classification head reads
    stated = source.pooling.mode
    if section.pooling is not PoolingChoice.auto:
        stated = section.pooling.value
    return PoolingKind(stated or source.config.kind.default_pooling)


def model_name(section: ModelSection, path: Path | None) -> str:
    """The name of the served model: as configured, else the last part of its path."""
    if section.name:
        return section.name
    if path is not None and is_gguf_path(path):
        return GGUF_ENDING.sub("", path.name)
    if not section.path:
        return "ostinato-demo" if path is not None else "dummy"
    return Path(section.path).name if Path(section.path).is_dir() else section.path
