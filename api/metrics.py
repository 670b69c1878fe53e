"""What `/metrics` says, in Prometheus' text format.

Two sources: the engine's newest snapshot, read when someone asks, and the API's own timing of
requests. docs/http-api.md lists the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ostinato.graphs.seal import IDLE, CompileKind
from ostinato.runtime.restarts import DeathReason
from ostinato.runtime.types import EngineStats

__all__ = ("CONTENT_TYPE", "EngineView", "Metrics")

CONTENT_TYPE = "text/plain; version=0.0.4"

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5, 10)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class EngineView(Protocol):
    """Where the engine's newest figures are found."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def startup_seconds(self) -> dict[str, float]: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def seconds_since_step(self) -> float: ...

    @property
    def restarts(self) -> Mapping[str, int]: ...


class Metrics:
    """One server's figures, in a registry of their own.

    Args:
        engine: read at each scrape.
    """

    def __init__(self, engine: EngineView) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(engine))
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to a completion's first token.", _TTFT_S
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of one completion.", _ITL_S
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to a request's last token.", _E2E_S
        )
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a finished request.", _TOKENS
        )
        self._completions = Counter(
            "ostinato_completions",
            "Completions that ended, by reason; a request with n has n.",
            ["finish_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._completions.labels(reason)
        self._refusals = Counter(
            "ostinato_refused_requests",
            "Requests answered with an error status.",
            ["status"],
            registry=self._registry,
        )

    def count_completion(self, finish_reason: str) -> None:
        self._completions.labels(finish_reason).inc()

    def count_refusal(self, status: int) -> None:
        self._refusals.labels(str(status)).inc()

    def render(self) -> bytes:
        """Everything, in the text format of Prometheus."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"ostinato_{name}", text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """The engine's snapshot as metrics; nothing is counted twice or kept here."""

    def __init__(self, engine: EngineView) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        used = stats.num_blocks - stats.num_free_blocks
        gauges = {
            "requests_running": ("Sequences in the running batch.", stats.num_running),
            "requests_waiting": ("Sequences waiting for a place.", stats.num_waiting),
            "kv_cache_usage_ratio": (
                "KV blocks in use, of all; 0 to 1.",
                used / stats.num_blocks if stats.num_blocks else 0.0,
            ),
            "kv_cache_blocks": ("KV blocks there are.", stats.num_blocks),
            "max_num_seqs": ("Sequences that may run at once.", stats.max_num_seqs),
            "max_num_batched_tokens": (
                "Tokens that one step may compute.",
                stats.max_num_batched_tokens,
            ),
            "predicted_decode_step_seconds": (
                "Of what decodes now, or of one sequence; 0 without measured step costs.",
                stats.predicted_step_seconds,
            ),
            "predicted_ttft_seconds": (
                "Of a request of mean length that came now; 0 without measured step costs.",
                stats.predicted_ttft_seconds,
            ),
            "engine_up": ("1 while the engine process runs.", int(self._engine.is_alive)),
            "engine_heartbeat_age_seconds": (
                "Since the engine's last step or idle beat.",
                self._engine.seconds_since_step,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"ostinato_{name}", text, value=value)
        phases = GaugeMetricFamily(
            "ostinato_startup_seconds",
            "Phases of the start, some of them side by side; ready is the whole start.",
            labels=["phase"],
        )
        for phase, seconds in self._engine.startup_seconds.items():
            phases.add_metric([phase], seconds)
        yield phases
        counters = {
            "prompt_tokens": ("Prompt tokens computed, cache hits excluded.", "num_prompt_tokens"),
            "generation_tokens": ("Output tokens.", "num_output_tokens"),
            "padding_tokens": ("Computed to fill captured buckets up.", "num_padding_tokens"),
            "prefix_cache_queries": ("Prompt tokens looked up in the cache.", "prefix_queries"),
            "prefix_cache_hits": ("Prompt tokens found there.", "prefix_hits"),
            "preemptions": ("Sequences put back to wait for blocks.", "num_preemptions"),
            "step_seconds": ("Time in engine steps.", "step_seconds"),
            "model_seconds": ("Of which in the model and the sampler.", "model_seconds"),
            "device_seconds": ("Time that steps took on the device.", "device_seconds"),
        }
        for name, (text, field) in counters.items():
            yield CounterMetricFamily(f"ostinato_{name}", text, value=getattr(stats, field))
        by_kind = CounterMetricFamily(
            "ostinato_steps", "Engine steps by how the model was run.", labels=["kind"]
        )
        for kind in ("captured", "compiled", "eager"):
            by_kind.add_metric([kind], stats.steps_by_kind.get(kind, 0))
        yield by_kind
        restarts = CounterMetricFamily(
            "ostinato_engine_restarts",
            "Starts of a new engine process, by what the last one died of.",
            labels=["reason"],
        )
        for reason in DeathReason:
            restarts.add_metric([reason.value], self._engine.restarts.get(reason.value, 0))
        yield restarts
        yield _late_compiles(stats)


def _late_compiles(stats: EngineStats) -> Metric:
    """Every kind has a sample from the start, so that a first one shows as an increase."""
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
