"""`RequestedAdapters`: which adapters were loaded for which `LoRARequest`, and which to replace."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ostinato.runtime.client.adapter_registry import AdapterRegistry
from ostinato.runtime.types.adapters import LoRARequest, ServedAdapter

__all__ = ("RequestedAdapters",)


class _Known(NamedTuple):
    lora_int_id: int | None  # None: a configured adapter that no request has named
    lora_path: str
    adapter: ServedAdapter


class RequestedAdapters:
    """Finds the adapters that were loaded for `LoRARequest`s, by name, id and path.

    Args:
        registry: has the adapters.
    """

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._known: OrderedDict[str, _Known] = OrderedDict()  # least recently used first

    @property
    def ids(self) -> dict[int, str]:
        """The id of each loaded adapter that has one -> its name."""
        return {
            known.lora_int_id: name
            for name, known in self._known.items()
            if known.lora_int_id is not None and self._is_loaded(name)
        }

    def find(self, request: LoRARequest) -> ServedAdapter | None:
        """The adapter that was loaded for an equal request; it is now the most recently used."""
        name = request.lora_name
        if not self._is_loaded(name):
            return None
        known = self._known[name]
        if known.lora_path != request.lora_path:
            return None
        if known.lora_int_id not in (None, request.lora_int_id):
            return None
        self._known[name] = known._replace(lora_int_id=request.lora_int_id)
        self._known.move_to_end(name)
        return known.adapter

    def note(self, adapter: ServedAdapter, lora_path: str, lora_int_id: int | None) -> None:
        """Note that an adapter has been loaded for a request, or for the configuration."""
        self._known[adapter.name] = _Known(lora_int_id, lora_path, adapter)
        self._known.move_to_end(adapter.name)

    def make_room(self) -> None:
        """If no slot is free, unload the least recently used adapter that no request holds."""
        if self._registry.num_free:
            return
        order = {name: number for number, name in enumerate(self._known)}
        # An adapter that is not known was not loaded for a request.
        for adapter in sorted(self._registry.served, key=lambda one: order.get(one.name, -1)):
            if not self._registry.num_holds(adapter):
                self._registry.remove(adapter.name)
                return

    def _is_loaded(self, name: str) -> bool:
        """Whether a name is known and still means the same adapter."""
        return name in self._known and self._registry.get(name) == self._known[name].adapter
