"""The part of the configuration that an engine process receives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ostinato.conf.schema import (
    DeviceConfig,
    GraphConfig,
    ModelSection,
    PoolingChoice,
    RuntimeSection,
    SamplingSection,
    SchedulerConfig,
)
from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.cache_schema import CacheConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.conf.sections.server_schema import ParallelConfig
from ostinato.conf.sections.speculation_schema import (
    NO_DRAFTS,
    SpeculationConfig,
    SpeculationMethod,
)
from ostinato.conf.sections.video_schema import VideoConfig

__all__ = ("EngineConfig", "draft_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The sections that an engine is built from, each with its defaults."""

    model: ModelSection = field(default_factory=ModelSection)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    audio: AudioConfig = field(default_factory=AudioConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    runtime: RuntimeSection = field(default_factory=RuntimeSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


def draft_config(config: EngineConfig) -> EngineConfig:
    """The configuration of the draft model's programs and weights.

    It has the model's settings, except for the settings that belong to the model's checkpoint. Its
    KV cache has no copies in slower tiers: the drafter computes what its cache lacks.

    Args:
        config: the configuration of an engine with a draft model, a head or an MTP layer.
    """
    cache = config.cache.without_tiers()
    if config.speculation.method is SpeculationMethod.mtp:  # a layer of the model's checkpoint
        return replace(config, cache=cache, speculation=NO_DRAFTS, lora=LoraConfig())
    section = replace(
        config.model,
        path=config.speculation.model,
        name="",
        tokenizer="",
        revision="",
        chat_template="",
        max_model_len=None,
        pooling=PoolingChoice.auto,
        config={},
    )
    return replace(config, model=section, cache=cache, speculation=NO_DRAFTS, lora=LoraConfig())
