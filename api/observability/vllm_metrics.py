"""Exports the metrics under vLLM's names, for dashboards made for vLLM.

vLLM's names have a colon and the labels `model_name` and `engine`. The values are sums over all
engines of this server, under `engine="0"`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ostinato.api.observability.adapter_metrics import AdapterUse
from ostinato.api.observability.tier_metrics import loaded_tokens, looked_up_tokens
from ostinato.runtime.types.engine_info import EngineStats, ServedModel

__all__ = ("VLLM_NAMES", "VllmAdapterCollector", "VllmCollector")

# Names of metric families: counters without "_total".
VLLM_NAMES = {
    "ostinato_requests_running": "vllm:num_requests_running",
    "ostinato_requests_waiting": "vllm:num_requests_waiting",
    "ostinato_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "ostinato_preemptions": "vllm:num_preemptions",
    "ostinato_prefix_cache_queries": "vllm:prefix_cache_queries",
    "ostinato_prefix_cache_hits": "vllm:prefix_cache_hits",
    "ostinato_generation_tokens": "vllm:generation_tokens",
    "ostinato_drafts": "vllm:spec_decode_num_drafts",
    "ostinato_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "ostinato_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens",
    "ostinato_accepted_draft_tokens_by_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "ostinato_iteration_tokens": "vllm:iteration_tokens_total",
    "ostinato_completions": "vllm:request_success",
    "ostinato_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "ostinato_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "ostinato_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "ostinato_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "ostinato_request_queue_seconds": "vllm:request_queue_time_seconds",
    "ostinato_request_prefill_seconds": "vllm:request_prefill_time_seconds",
    "ostinato_request_decode_seconds": "vllm:request_decode_time_seconds",
    "ostinato_request_inference_seconds": "vllm:request_inference_time_seconds",
    "ostinato_request_prompt_tokens": "vllm:request_prompt_tokens",
    "ostinato_request_prefill_computed_tokens": "vllm:request_prefill_kv_computed_tokens",
    "ostinato_request_generation_tokens": "vllm:request_generation_tokens",
    "ostinato_request_max_generation_tokens": "vllm:request_max_num_generation_tokens",
    "ostinato_request_params_n": "vllm:request_params_n",
    "ostinato_request_params_max_tokens": "vllm:request_params_max_tokens",
    "ostinato_request_preemptions": "vllm:request_num_preemptions",
}
_LABELS = {"finish_reason": "finished_reason"}
_FAILURES = ("error",)


class VllmCollector(Collector):
    """Renames the metrics of other collectors.

    Args:
        collect: our own metric families.
        model: returns the served model, or None until the engine has started. Until then there are
            no metrics.
        stats: the engine's latest statistics.
    """

    def __init__(
        self,
        collect: Callable[[], Iterable[Metric]],
        model: Callable[[], ServedModel | None],
        stats: Callable[[], EngineStats],
    ) -> None:
        self._collect = collect
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        model = self._model()
        if model is None:
            return
        labels = {"model_name": model.name, "engine": "0"}
        for family in self._collect():
            name = VLLM_NAMES.get(family.name)
            if name is not None:
                yield _renamed(family, name, labels)
        yield from self._prompt_tokens(labels)
        yield from self._tier_tokens(labels, model.block_size)
        yield self._waiting(labels)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=[*labels, "num_gpu_blocks"]
        )
        info.add_metric([*labels.values(), str(self._stats().num_blocks)], 1)
        yield info

    def _prompt_tokens(self, labels: dict[str, str]) -> Iterator[Metric]:
        """vLLM's counters of prompt tokens.

        `vllm:prompt_tokens` includes cached tokens. Our counter `ostinato_prompt_tokens` does not.
        """
        stats = self._stats()
        for name, value in {
            "vllm:prompt_tokens": stats.num_prompt_tokens + stats.prefix_hits,
            "vllm:prompt_tokens_cached": stats.prefix_hits,
        }.items():
            family = CounterMetricFamily(name, "Prompt tokens.", labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens.", labels=[*labels, "source"]
        )
        family.add_metric([*labels.values(), "local_compute"], stats.num_prompt_tokens)
        family.add_metric([*labels.values(), "local_cache_hit"], stats.prefix_hits)
        yield family

    def _tier_tokens(self, labels: dict[str, str], block_size: int) -> Iterator[Metric]:
        """vLLM's counters of tokens that it looks up and finds outside of the device's memory.

        They exist if there is a tier. In vLLM they exist if there is a KV connector.
        """
        stats = self._stats()
        if not stats.tiers:
            return
        for name, value in {
            "vllm:external_prefix_cache_queries": looked_up_tokens(stats, block_size),
            "vllm:external_prefix_cache_hits": loaded_tokens(stats, block_size),
        }.items():
            family = CounterMetricFamily(name, "Tokens in slower tiers.", labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family

    def _waiting(self, labels: dict[str, str]) -> Metric:
        """Waiting sequences by reason; `deferred` = they wait for a grammar or an encoding."""
        stats = self._stats()
        num_deferred = stats.num_waiting_for_grammar + stats.num_waiting_for_encodings
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait.",
            labels=[*labels, "reason"],
        )
        family.add_metric([*labels.values(), "capacity"], stats.num_waiting - num_deferred)
        family.add_metric([*labels.values(), "deferred"], num_deferred)
        return family


class VllmAdapterCollector(Collector):
    """vLLM's metric of adapters. It exists if the server can have adapters.

    Its labels have the names of the adapters, joined by commas. Its value is the present time, in
    seconds since 1970. Load balancers read it to send a request where its adapter is in use.
    """

    def __init__(self, adapters: AdapterUse) -> None:
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        if not self._adapters.num_slots:
            return
        labels = {
            "max_lora": str(self._adapters.num_slots),
            "running_lora_adapters": ",".join(self._adapters.running),
            "waiting_lora_adapters": ",".join(self._adapters.waiting),
        }
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters of requests.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), time.time())
        yield family


def _renamed(family: Metric, name: str, labels: dict[str, str]) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix == "_created":
            continue
        own = {_LABELS.get(key, key): value for key, value in sample.labels.items()}
        if own.get("finished_reason") in _FAILURES:
            continue  # vLLM counts only successful requests
        renamed.add_sample(name + suffix, labels | own, sample.value)
    return renamed
