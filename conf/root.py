"""The whole configuration of a command.

Only the modules that put an engine, a server or a command together import this type. Every other
component receives its own section.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.sections.bench_schema import (
    BenchSection,
    LoadSection,
    SloSection,
    WorkloadSection,
)
from ostinato.conf.sections.command_schema import (
    BatchSection,
    ChatSection,
    CompileSection,
    GenerateSection,
    PlanSection,
    QuantizeSection,
)
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.conf.sections.tuning_schema import SimulateSection, TuneSection

__all__ = ("RunConfig",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(EngineConfig):
    """The engine's sections and those of the server and each command."""

    server: ServerConfig = field(default_factory=ServerConfig)
    generate: GenerateSection = field(default_factory=GenerateSection)
    chat: ChatSection = field(default_factory=ChatSection)
    batch: BatchSection = field(default_factory=BatchSection)
    compile: CompileSection = field(default_factory=CompileSection)
    plan: PlanSection = field(default_factory=PlanSection)
    quantize: QuantizeSection = field(default_factory=QuantizeSection)
    bench: BenchSection = field(default_factory=BenchSection)
    workload: WorkloadSection = field(default_factory=WorkloadSection)
    load: LoadSection = field(default_factory=LoadSection)
    slo: SloSection = field(default_factory=SloSection)
    simulate: SimulateSection = field(default_factory=SimulateSection)
    tune: TuneSection = field(default_factory=TuneSection)

    @property
    def engine(self) -> EngineConfig:
        """The engine's sections alone, which other processes receive."""
        return EngineConfig(
            **{entry.name: getattr(self, entry.name) for entry in fields(EngineConfig)}
        )
