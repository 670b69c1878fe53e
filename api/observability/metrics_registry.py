"""The metrics of `/metrics`, in the text format of Prometheus.

There are three sources. The engine's statistics and the machine's usage are read at each scrape;
the API measures requests itself. docs/observability.md lists the names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric

from ostinato.api.observability.engine_metrics import EngineCollector, EngineView, MachineCollector
from ostinato.api.observability.recent_latency import RecentLatency
from ostinato.api.observability.resource_usage import MachineProbe
from ostinato.api.observability.vllm_metrics import VllmCollector

__all__ = ("CONTENT_TYPE", "EngineView", "Metrics")

CONTENT_TYPE = "text/plain; version=0.0.4"

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5, 10)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_PART_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_COUNTS = (1, 2, 3, 4, 5, 8, 10, 20, 50, 100)


class Metrics:
    """The metrics of one server, in a registry of its own.

    Args:
        engine: read at each scrape.
        model_name: of the served model, None until the engine has started; for vLLM's names.
        vllm_names: whether the metrics are given under vLLM's names too.

    Attributes:
        recent_latency: percentiles of the last ten seconds, for the page.
        probe: reads the resource usage.
    """

    def __init__(
        self,
        engine: EngineView,
        model_name: Callable[[], str | None] = lambda: None,
        *,
        vllm_names: bool = True,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.probe = MachineProbe()
        self.recent_latency = RecentLatency()
        engine_collector = EngineCollector(engine)
        self._registry.register(engine_collector)
        self._registry.register(MachineCollector(engine, self.probe))
        ProcessCollector(registry=self._registry)
        self._own: list[Counter | Histogram] = []
        self._make_latencies()
        self._make_sizes()
        self._completions = self._counter(
            "completions",
            "Completions that ended, by reason; a request with n has n.",
            ["finish_reason"],
        )
        for reason in ("stop", "length", "abort", "error"):
            self._completions.labels(reason)
        self._vectors = self._counter(
            "pooled_inputs", "Texts and pairs that were answered with an embedding or a score.", []
        )
        self._refusals = self._counter(
            "refused_requests", "Requests answered with an error status.", ["status"]
        )
        # The name that dashboards of web servers expect.
        self._replies = Counter(
            "http_requests",
            "Answers that have begun, by endpoint and class of status.",
            ["handler", "method", "status"],
            registry=self._registry,
        )
        if vllm_names:

            def ours() -> Iterable[Metric]:
                collected = (one.collect() for one in self._own)
                return itertools.chain(engine_collector.collect(), *collected)

            self._registry.register(VllmCollector(ours, model_name, lambda: engine.stats))

    def _make_latencies(self) -> None:
        histogram = self._histogram
        self.ttft = histogram(
            "time_to_first_token_seconds", "From arrival to a completion's first token.", _TTFT_S
        )
        self.itl = histogram(
            "inter_token_latency_seconds", "Between two outputs of one completion.", _ITL_S
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds", "From arrival to a request's last token.", _E2E_S
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Of a completion: from its first token to its last, by its tokens after the first.",
            _ITL_S,
        )
        self.queue = histogram(
            "request_queue_seconds", "Of a completion: from arrival until it had a row.", _PART_S
        )
        self.prefill = histogram(
            "request_prefill_seconds", "Of a completion: from then to its first token.", _PART_S
        )
        self.decode = histogram(
            "request_decode_seconds", "Of a completion: from its first token to its last.", _E2E_S
        )
        self.grammar = histogram(
            "request_grammar_seconds",
            "Of a constrained request: until its grammar was checked.",
            _PART_S,
        )
        self.inference = histogram(
            "request_inference_seconds", "Of a completion: with a row, to its last token.", _E2E_S
        )

    def _make_sizes(self) -> None:
        histogram = self._histogram
        self.prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS
        )
        self.computed_tokens = histogram(
            "request_prefill_computed_tokens",
            "Prompt tokens of a finished request that were not in the cache.",
            _TOKENS,
        )
        self.generation_tokens = histogram(
            "request_generation_tokens", "Output tokens of a finished request.", _TOKENS
        )
        self.max_generation_tokens = histogram(
            "request_max_generation_tokens",
            "Output tokens of the longest completion of a finished request.",
            _TOKENS,
        )
        self.params_n = histogram("request_params_n", "`n` of a request.", _COUNTS)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "`max_tokens` of a request, resolved.", _TOKENS
        )
        self.preemptions = histogram(
            "request_preemptions", "How often a completion was preempted.", (0, *_COUNTS)
        )

    def count_completion(self, finish_reason: str) -> None:
        self._completions.labels(finish_reason).inc()

    def count_vectors(self, num_inputs: int) -> None:
        """A request for embeddings, scores or a ranking was answered."""
        self._vectors.inc(num_inputs)

    def count_reply(self, handler: str, method: str, status: int) -> None:
        """A response of an endpoint has begun."""
        self._replies.labels(handler, method, f"{status // 100}xx").inc()

    def count_refusal(self, status: int) -> None:
        self._refusals.labels(str(status)).inc()

    def render(self) -> bytes:
        """All metrics, in the text format of Prometheus."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"ostinato_{name}", text, buckets=buckets, registry=self._registry)
        self._own.append(made)
        return made

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        made = Counter(f"ostinato_{name}", text, labels, registry=self._registry)
        self._own.append(made)
        return made
