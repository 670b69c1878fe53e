"""Prometheus metrics of the engine and the machine, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ostinato import __version__
from ostinato.api.observability.resource_usage import MachineProbe, MachineUse
from ostinato.api.observability.tier_metrics import tier_families
from ostinato.graphs.compile_monitor import IDLE, CompileKind
from ostinato.runtime.replicas.restarts import DeathReason
from ostinato.runtime.types.engine_info import ITERATION_TOKENS, EngineStats, ReplicaStatus
from ostinato.runtime.types.speculation import SpeculationStats

__all__ = ("EngineCollector", "EngineView", "MachineCollector", "ReplicaView")

_KINDS = ("captured", "compiled", "eager")
_PROGRAMS = ("captured", "fx", "inductor", "eager")


class MeasuredEngine(Protocol):
    """The latest statistics of one engine, or of all engines together."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def seconds_since_step(self) -> float: ...

    @property
    def restarts(self) -> Mapping[str, int]: ...


class ReplicaView(MeasuredEngine, Protocol):
    """One of the engines."""

    @property
    def status(self) -> ReplicaStatus: ...


class EngineView(MeasuredEngine, Protocol):
    """All engines of the server."""

    @property
    def replicas(self) -> Sequence[ReplicaView]: ...

    @property
    def startup_seconds(self) -> dict[str, float]: ...

    @property
    def determinism(self) -> dict[str, str]:
        """The labels of `ostinato_determinism`: `class` (bitwise | none), `isa`, `fingerprint`.

        Empty until the engine has started.
        """
        ...


class EngineCollector(Collector):
    """The engines' statistics as metrics. It keeps no state of its own.

    With several engines, each sample has the number of its engine as the label `engine`.
    """

    def __init__(self, engine: EngineView) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        replicas = self._engine.replicas
        yield from _families(replicas[0]) if len(replicas) == 1 else _labelled(replicas)
        yield InfoMetricFamily("ostinato_build", "The version.", value={"version": __version__})
        if promise := self._engine.determinism:
            yield InfoMetricFamily(
                "ostinato_determinism", "Whether answers depend on the batch.", value=promise
            )
        yield _by_label(
            GaugeMetricFamily,
            "startup_seconds",
            "Seconds of each phase of the start; some run in parallel. ready = the whole start.",
            "phase",
            self._engine.startup_seconds,
        )

    def collect_sums(self) -> Iterator[Metric]:
        """The metrics of all engines together, without the label `engine`."""
        yield from _families(self._engine)


class MachineCollector(Collector):
    """Resource usage of the processes and the GPUs as metrics."""

    def __init__(self, engine: EngineView, probe: MachineProbe) -> None:
        self._engine = engine
        self._probe = probe

    def collect(self) -> Iterator[Metric]:
        statuses = [replica.status for replica in self._engine.replicas]
        use = self._probe.read(
            [one.local_pid for one in statuses], [one.local_rank_pids for one in statuses]
        )
        processes = use.processes
        yield _by_label(
            CounterMetricFamily,
            "process_cpu_seconds",
            "Processor time.",
            "process",
            {name: one.cpu_seconds for name, one in processes.items()},
        )
        yield _by_label(
            GaugeMetricFamily,
            "process_resident_memory_bytes",
            "Memory in use.",
            "process",
            {name: one.resident_bytes for name, one in processes.items()},
        )
        yield GaugeMetricFamily(
            "ostinato_cpus", "Processors that the server may use.", value=use.num_cpus
        )
        yield from _gpus(use)


def _families(engine: MeasuredEngine) -> Iterator[Metric]:
    """All families of one engine's metrics."""
    stats = engine.stats
    yield from _gauges(engine)
    yield from _counters(stats)
    yield _by_label(
        CounterMetricFamily,
        "steps",
        "Engine steps by how the model was run.",
        "kind",
        {kind: stats.steps_by_kind.get(kind, 0) for kind in _KINDS},
    )
    yield _by_label(
        GaugeMetricFamily,
        "layers",
        "Layers of the model, by the program that runs them in steps of few tokens.",
        "program",
        {program: stats.layers_by_program.get(program, 0) for program in _PROGRAMS},
    )
    yield _by_label(
        CounterMetricFamily,
        "device_seconds",
        "Seconds of finished steps on the device, by how the model was run.",
        "kind",
        {kind: stats.device_seconds_by_kind.get(kind, 0.0) for kind in _KINDS},
    )
    yield _by_label(
        CounterMetricFamily,
        "engine_restarts",
        "Restarts of the engine process, by the reason why the previous process ended.",
        "reason",
        {one.value: engine.restarts.get(one.value, 0) for one in DeathReason},
    )
    yield _iteration_tokens(stats)
    yield from _drafts(stats.speculation or SpeculationStats())
    yield _late_compiles(stats)
    yield from tier_families(stats)


def _labelled(engines: Sequence[MeasuredEngine]) -> Iterable[Metric]:
    """The families of several engines, with the label `engine`.

    Engines can differ in their families: one that has not reported yet has no tier.
    """
    joined: dict[str, Metric] = {}
    for number, engine in enumerate(engines):
        for family in _families(engine):
            new = Metric(family.name, family.documentation, family.type)
            same = joined.setdefault(family.name, new)
            for sample in family.samples:
                labels = {**sample.labels, "engine": str(number)}
                same.add_sample(sample.name, labels, sample.value)
    return joined.values()


def _gauges(engine: MeasuredEngine) -> Iterator[Metric]:
    stats = engine.stats
    used = stats.num_blocks - stats.num_free_blocks
    used_slots = stats.num_state_slots - stats.num_free_state_slots
    gauges = {
        "requests_running": ("Sequences in the running batch.", stats.num_running),
        "requests_waiting": (
            "Sequences that wait for a place in the batch, for blocks or for a grammar.",
            stats.num_waiting,
        ),
        "requests_waiting_for_grammar": (
            "Sequences that wait for their grammar.",
            stats.num_waiting_for_grammar,
        ),
        "requests_waiting_for_encodings": (
            "Sequences whose images, videos or audio are not encoded.",
            stats.num_waiting_for_encodings,
        ),
        "kv_cache_usage_ratio": (
            "Share of KV blocks in use, 0 to 1.",
            used / stats.num_blocks if stats.num_blocks else 0.0,
        ),
        "kv_cache_blocks": ("Usable KV blocks.", stats.num_blocks),
        "state_slots_usage_ratio": (
            "Share of slots for states of recurrent layers in use, 0 to 1.",
            used_slots / stats.num_state_slots if stats.num_state_slots else 0.0,
        ),
        "state_slots": (
            "Usable slots for states of recurrent layers; 0 = no layer is recurrent.",
            stats.num_state_slots,
        ),
        "max_num_seqs": ("Sequences that may run at once.", stats.max_num_seqs),
        "max_num_batched_tokens": (
            "Tokens that one step may compute.",
            stats.max_num_batched_tokens,
        ),
        "predicted_decode_step_seconds": (
            "Predicted seconds of a decode step of the running sequences; 0 = not measured.",
            stats.predicted_step_seconds,
        ),
        "predicted_ttft_seconds": (
            "Predicted TTFT of a new request of mean length; 0 = not measured.",
            stats.predicted_ttft_seconds,
        ),
        "engine_up": ("1 while the engine process runs.", int(engine.is_alive)),
        "engine_heartbeat_age_seconds": (
            "Seconds since the engine's last step or idle heartbeat.",
            engine.seconds_since_step,
        ),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"ostinato_{name}", text, value=value)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    counters = {
        "prompt_tokens": ("Prompt tokens computed, cache hits excluded.", "num_prompt_tokens"),
        "generation_tokens": ("Output tokens.", "num_output_tokens"),
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queries"),
        "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hits"),
        "preemptions": (
            "Running sequences that lost their place in the batch and waited again.",
            "num_preemptions",
        ),
        "kv_cache_evictions": ("Cached blocks reused for other contents.", "num_evictions"),
        "step_seconds": ("Time in engine steps.", "step_seconds"),
        "model_seconds": (
            "Time in the model and the sampler, within engine steps.",
            "model_seconds",
        ),
        "host_gap_seconds": (
            "Time in which the engine had work, but neither ran the model nor waited for it.",
            "host_gap_seconds",
        ),
        "scheduled_tokens": ("Tokens of all steps, without padding.", "num_scheduled_tokens"),
        "padding_tokens": (
            "Padding tokens, computed to fill captured buckets.",
            "num_padding_tokens",
        ),
        "grammar_seconds": ("Time spent on masks of grammars, within steps.", "grammar_seconds"),
        "grammar_build_seconds": (
            "Time spent on building grammars, beside the steps.",
            "grammar_build_seconds",
        ),
        "inputs_encoded": (
            "Images, pairs of video frames and windows of audio that were encoded.",
            "num_inputs_encoded",
        ),
        "encoding_hits": (
            "Images, videos and audio of requests that were encoded before.",
            "num_encoding_hits",
        ),
        "encode_seconds": (
            "Time for encoding images, videos and audio, between steps.",
            "encode_seconds",
        ),
    }
    for name, (text, field) in counters.items():
        yield CounterMetricFamily(f"ostinato_{name}", text, value=getattr(stats, field))


def _gpus(use: MachineUse) -> Iterator[Metric]:
    """One metric family for each kind of value; none without a GPU."""
    figures = {
        "utilization_ratio": ("Share of time in which a kernel ran.", "utilization"),
        "memory_used_bytes": ("Memory in use.", "memory_used_bytes"),
        "memory_total_bytes": ("Memory in total.", "memory_total_bytes"),
        "power_watts": ("Power.", "power_watts"),
        "temperature_celsius": ("Temperature.", "temperature_celsius"),
    }
    for name, (text, field) in figures.items():
        family = GaugeMetricFamily(f"ostinato_gpu_{name}", text, labels=["gpu", "name"])
        for gpu in use.gpus:
            value = getattr(gpu, field)
            if value is not None:
                family.add_metric([str(gpu.index), gpu.name], value)
        if family.samples:
            yield family


def _iteration_tokens(stats: EngineStats) -> Metric:
    counts = stats.iteration_tokens or [0] * (len(ITERATION_TOKENS) + 1)
    bounds = [*map(str, map(float, ITERATION_TOKENS)), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts), strict=True))
    return HistogramMetricFamily(
        "ostinato_iteration_tokens",
        "Tokens of a step.",
        buckets=buckets,
        sum_value=stats.num_scheduled_tokens,
    )


def _drafts(speculation: SpeculationStats) -> Iterator[Metric]:
    counters = {
        "drafts": ("Drafts of one sequence that a step verified.", speculation.num_drafts),
        "draft_tokens": ("Draft tokens.", speculation.num_draft_tokens),
        "accepted_draft_tokens": (
            "Draft tokens that were accepted: decoding without drafts gives them too.",
            speculation.num_accepted_tokens,
        ),
        "drafting_seconds": (
            "Seconds that a draft model or a head took, beside the steps of the model.",
            speculation.drafting_seconds,
        ),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"ostinato_{name}", text, value=value)
    yield _by_label(
        CounterMetricFamily,
        "accepted_draft_tokens_by_position",
        "Accepted draft tokens by their place in the draft.",
        "position",
        {str(place): count for place, count in enumerate(speculation.accepted_per_position)},
    )


def _late_compiles(stats: EngineStats) -> Metric:
    """The late compilations. Every kind has a sample from the start, so that the first compilation
    shows as an increase."""
    family = CounterMetricFamily(
        "ostinato_late_compiles",
        "Steps, or pauses between steps, in which something was compiled after start-up; "
        "should be 0.",
        labels=["what", "shape"],
    )
    counts = {(kind.value, IDLE): 0 for kind in CompileKind}
    counts |= {(late.what, late.shape): late.count for late in stats.late_compiles}
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family


def _by_label(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """A metric family with one sample per value of its only label."""
    family = kind(f"ostinato_{name}", text, labels=[label])
    for one, value in values.items():
        family.add_metric([one], value)
    return family
