"""The part of the configuration that an engine process receives."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.conf.schema import (
    CacheConfig,
    DeviceConfig,
    GraphConfig,
    ModelSection,
    SamplingSection,
    SchedulerConfig,
)

__all__ = ("EngineConfig",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The sections that an engine is built from, each with its defaults."""

    model: ModelSection = field(default_factory=ModelSection)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    sampling: SamplingSection = field(default_factory=SamplingSection)
