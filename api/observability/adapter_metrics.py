"""Counts the requests that name adapters, and reports them and the slots to Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ostinato.runtime.types.adapters import ServedAdapter

__all__ = ("AdapterUse", "LoadedAdapters")


class LoadedAdapters(Protocol):
    """The part of `AdapterRegistry` (runtime/client/adapter_registry.py) that the API needs."""

    @property
    def served(self) -> Sequence[ServedAdapter]:
        """The loaded adapters, in the order of loading."""
        ...

    def get(self, name: str) -> ServedAdapter | None:
        """The loaded adapter of this name, or None."""
        ...

    def hold(self, adapter: ServedAdapter) -> None:
        """Keep the adapter in its slot until `release`, even if it is unloaded."""
        ...

    def release(self, adapter: ServedAdapter) -> None:
        """End one `hold`."""
        ...


class AdapterUse(Collector):
    """The requests of each adapter. A request of several prompts counts once.

    Only loaded adapters become labels, so the number of labels is limited by the number of slots.

    Args:
        loaded: returns the loaded adapters. Only called if there are slots.
        num_slots: number of adapters that can be loaded.

    Attributes:
        num_slots: the argument `num_slots`.
    """

    def __init__(self, loaded: Callable[[], LoadedAdapters], num_slots: int) -> None:
        self._loaded = loaded
        self.num_slots = num_slots
        self._totals: Counter[str] = Counter()
        self._waiting: Counter[ServedAdapter] = Counter()
        self._running: Counter[ServedAdapter] = Counter()

    def begin(self, adapter: ServedAdapter) -> None:
        """Count a request that waits for its first output."""
        self._totals[adapter.name] += 1
        if len(self._totals) > self.num_slots:
            self._forget_unloaded()
        self._waiting[adapter] += 1

    def run(self, adapter: ServedAdapter) -> None:
        """Note the first output of a request."""
        _remove(self._waiting, adapter)
        self._running[adapter] += 1

    def end(self, adapter: ServedAdapter, *, ran: bool) -> None:
        """Note the end of a request.

        Args:
            adapter: the adapter.
            ran: whether the request had an output.
        """
        _remove(self._running if ran else self._waiting, adapter)

    @property
    def running(self) -> list[str]:
        """Names of the adapters of requests with output, sorted."""
        return sorted({adapter.name for adapter in self._running})

    @property
    def waiting(self) -> list[str]:
        """Names of the adapters of requests that wait for their first output, sorted."""
        return sorted({adapter.name for adapter in self._waiting})

    def collect(self) -> Iterator[Metric]:
        served = self._loaded().served if self.num_slots else ()
        # An unloaded adapter keeps its slot until its last request has ended.
        used = {adapter.slot for adapter in (*served, *self._running, *self._waiting)}
        yield GaugeMetricFamily(
            "ostinato_adapter_slots", "Adapters that can be loaded at once.", value=self.num_slots
        )
        yield GaugeMetricFamily(
            "ostinato_adapter_slots_used",
            "Slots of adapters that are loaded, or were unloaded and still have requests.",
            value=len(used),
        )
        family = CounterMetricFamily(
            "ostinato_adapter_requests", "Requests that name the adapter.", labels=["adapter"]
        )
        if self.num_slots:
            self._forget_unloaded()
        for adapter in served:
            family.add_metric([adapter.name], self._totals[adapter.name])
        yield family

    def _forget_unloaded(self) -> None:
        """Drop the counts of names that are not loaded any more."""
        names = {adapter.name for adapter in self._loaded().served}
        for name in self._totals.keys() - names:
            del self._totals[name]


def _remove(counts: Counter[ServedAdapter], adapter: ServedAdapter) -> None:
    counts[adapter] -= 1
    if not counts[adapter]:
        del counts[adapter]
