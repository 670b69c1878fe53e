"""The metrics of `/metrics`, in the text format of Prometheus.

There are three sources. The engine's statistics and the machine's usage are read at each scrape.
The API process measures requests itself. docs/metrics.md lists the names.
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

from ostinato.api.observability.adapter_metrics import AdapterUse
from ostinato.api.observability.engine_metrics import EngineCollector, EngineView, MachineCollector
from ostinato.api.observability.recent_latency import RecentLatency
from ostinato.api.observability.resource_usage import MachineProbe
from ostinato.api.observability.vllm_metrics import VllmAdapterCollector, VllmCollector
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.outputs import FinishReason

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
        engine: the engines, read at each scrape.
        adapters: counts the requests that name adapters.
        model: returns the served model, or None until the engine has started. Only vLLM's names
            need it.
        vllm_names: whether the metrics are also exported under vLLM's names.

    Attributes:
        adapters: the argument `adapters`.
        recent_latency: percentiles of the last ten seconds, for the server's web page.
        probe: reads the resource usage.
    """

    def __init__(
        self,
        engine: EngineView,
        adapters: AdapterUse,
        model: Callable[[], ServedModel | None] = lambda: None,
        *,
        vllm_names: bool = True,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.probe = MachineProbe()
        self.recent_latency = RecentLatency()
        self.adapters = adapters
        engine_collector = EngineCollector(engine)
        self._registry.register(engine_collector)
        self._registry.register(MachineCollector(engine, self.probe))
        self._registry.register(adapters)
        ProcessCollector(registry=self._registry)
        self._own: list[Counter | Histogram] = []
        self._make_latencies()
        self._make_sizes()
        self._completions = self._counter(
            "completions",
            "Completions that ended, by reason; a request has `n` of them.",
            ["finish_reason"],
        )
        for reason in FinishReason:
            self._completions.labels(reason.value)
        self._vectors = self._counter(
            "pooled_inputs", "Texts and pairs that got an embedding or a score.", []
        )
        self._refusals = self._counter(
            "refused_requests", "Requests answered with an error status.", ["status"]
        )
        # Dashboards for web servers expect this name.
        self._replies = Counter(
            "http_requests",
            "Responses, by endpoint and class of status.",
            ["handler", "method", "status"],
            registry=self._registry,
        )
        if vllm_names:

            def ours() -> Iterable[Metric]:
                collected = (one.collect() for one in self._own)
                return itertools.chain(engine_collector.collect_sums(), *collected)

            self._registry.register(VllmCollector(ours, model, lambda: engine.stats))
            self._registry.register(VllmAdapterCollector(adapters))

    def _make_latencies(self) -> None:
        make = self._histogram
        self.ttft = make("time_to_first_token_seconds", "A completion's TTFT.", _TTFT_S)
        text = "Time between two outputs of a completion."
        self.itl = make("inter_token_latency_seconds", text, _ITL_S)
        text = "Time from a request's arrival to its last token."
        self.e2e = make("e2e_request_latency_seconds", text, _E2E_S)
        text = "Mean time between tokens of a completion, after its first token."
        self.tpot = make("time_per_output_token_seconds", text, _ITL_S)
        text = "Time from a completion's arrival until it joined the batch."
        self.queue = make("request_queue_seconds", text, _PART_S)
        text = "Time from when a completion joined the batch to its first token."
        self.prefill = make("request_prefill_seconds", text, _PART_S)
        text = "Time from a completion's first token to its last."
        self.decode = make("request_decode_seconds", text, _E2E_S)
        text = "Time that a constrained request took until its grammar was checked."
        self.grammar = make("request_grammar_seconds", text, _PART_S)
        text = "Time from when a completion joined the batch to its last token."
        self.inference = make("request_inference_seconds", text, _E2E_S)

    def _make_sizes(self) -> None:
        make = self._histogram
        text = "Prompt tokens of a finished request."
        self.prompt_tokens = make("request_prompt_tokens", text, _TOKENS)
        text = "Prompt tokens of a finished request that were not in the cache."
        self.computed_tokens = make("request_prefill_computed_tokens", text, _TOKENS)
        text = "Output tokens of a finished request."
        self.generation_tokens = make("request_generation_tokens", text, _TOKENS)
        text = "Output tokens of the longest completion of a finished request."
        self.max_generation_tokens = make("request_max_generation_tokens", text, _TOKENS)
        self.params_n = make("request_params_n", "`n` of a request.", _COUNTS)
        text = "`max_tokens` of a request, or its default."
        self.params_max_tokens = make("request_params_max_tokens", text, _TOKENS)
        text = "Number of preemptions of a completion."
        self.preemptions = make("request_preemptions", text, (0, *_COUNTS))

    def count_completion(self, finish_reason: str) -> None:
        self._completions.labels(finish_reason).inc()

    def count_vectors(self, num_inputs: int) -> None:
        """Count the inputs of an answered request for embeddings, scores or a ranking."""
        self._vectors.inc(num_inputs)

    def count_reply(self, handler: str, method: str, status: int) -> None:
        """Count a response that has begun."""
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
