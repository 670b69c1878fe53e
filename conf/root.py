"""The whole configuration: its sections and nothing else.

Only the composition roots see this type; every other component is handed its own section.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.conf.bench_schema import BenchSection, LoadSection, SloSection, WorkloadSection
from ostinato.conf.schema import (
    BatchSection,
    CacheConfig,
    ChatSection,
    DeviceConfig,
    GenerateSection,
    GraphConfig,
    ModelSection,
    PlanSection,
    SamplingSection,
    SchedulerConfig,
    ServerConfig,
)
from ostinato.conf.tuning_schema import SimulateSection, TuneSection

__all__ = ("EngineConfig",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every section, each with its defaults."""

    model: ModelSection = field(default_factory=ModelSection)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    server: ServerConfig = field(default_factory=ServerConfig)
    generate: GenerateSection = field(default_factory=GenerateSection)
    chat: ChatSection = field(default_factory=ChatSection)
    batch: BatchSection = field(default_factory=BatchSection)
    plan: PlanSection = field(default_factory=PlanSection)
    bench: BenchSection = field(default_factory=BenchSection)
    workload: WorkloadSection = field(default_factory=WorkloadSection)
    load: LoadSection = field(default_factory=LoadSection)
    slo: SloSection = field(default_factory=SloSection)
    simulate: SimulateSection = field(default_factory=SimulateSection)
    tune: TuneSection = field(default_factory=TuneSection)
