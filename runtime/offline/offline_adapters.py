"""`OfflineAdapters`: loads the adapters of an `LLM` into the engine of the same process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.runtime.client.adapter_loading import digest_of, find_adapter
from ostinato.runtime.client.adapter_registry import AdapterRegistry
from ostinato.runtime.client.requested_adapters import RequestedAdapters
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.offline.offline_steps import OfflineSteps
from ostinato.runtime.types.adapters import LoRARequest, ServedAdapter

if TYPE_CHECKING:
    from ostinato.runtime.engine.engine import Engine

__all__ = ("OfflineAdapters",)


class OfflineAdapters:
    """Loads adapters when a call first names them.

    If no slot is free, the least recently used adapter that no request holds is replaced.

    Args:
        engine: loads the adapters, while steps run.
        steps: its steps.
        lora: the section `lora` of the configuration.
    """

    def __init__(self, engine: Engine, steps: OfflineSteps, lora: LoraConfig) -> None:
        self._engine = engine
        self._steps = steps
        self._lora = lora
        self._registry = AdapterRegistry(lora.num_slots)
        self._registry.base_name = engine.model.name
        self._requested = RequestedAdapters(self._registry)
        # slot -> its adapter and what it is loaded for. A Ctrl-C can leave loads that go on.
        self._loading: dict[int, tuple[ServedAdapter, LoRARequest | None]] = {}
        self._failed: dict[int, str] = {}  # slot -> why its last load failed

    def load_configured(self) -> None:
        """Load the adapters of `lora.adapters`.

        Raises:
            StartupError: one cannot be loaded.
        """
        for name, path in self._lora.adapters.items():
            try:
                self._load(name, path, None)
            except InvalidRequestError as error:
                raise StartupError(f"lora.adapters, {name}={path}: {error}") from error

    @contextmanager
    def held(
        self, asked: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> Iterator[list[ServedAdapter | None]]:
        """A context in which the adapters of a call keep their slots; yields one for each prompt.

        Args:
            asked: one for all prompts, or a list with one for each prompt; None = the model alone.
            count: the number of prompts.

        Raises:
            InvalidRequestError: the list has another length, an adapter cannot be loaded, or the
                call names more adapters than there are slots.
            RankFailedError: a rank of the engine has ended or hangs.
        """
        wanted = _one_each(asked, count)
        distinct = {_identity(one): one for one in wanted if one is not None}
        if len(distinct) > self._registry.num_slots > 0:
            raise InvalidRequestError(
                f"the call names {len(distinct)} adapters, and lora.max_adapters="
                f"{self._registry.num_slots}; make several calls, or start with a larger max_loras",
                param="lora_request",
            )
        found: dict[tuple[str, int, str], ServedAdapter] = {}
        try:
            for identity, one in distinct.items():
                adapter = self._get(one)
                self._registry.hold(adapter)
                found[identity] = adapter
            yield [None if one is None else found[_identity(one)] for one in wanted]
        finally:
            for adapter in found.values():
                self._registry.release(adapter)

    def _get(self, one: LoRARequest) -> ServedAdapter:
        """The adapter of a request, which is loaded unless it is there."""
        name = one.lora_name
        while any(adapter.name == name for adapter, _ in self._loading.values()):
            self._wait()  # an earlier call began to load it, and was interrupted
        adapter = self._requested.find(one)
        if adapter is not None and not one.load_inplace:
            return adapter
        return self._load(name, one.lora_path, one)

    def _load(self, name: str, path: str, one: LoRARequest | None) -> ServedAdapter:
        registry, wrong = self._registry, "lora_request"
        try:
            directory = find_adapter(path)
        except ValueError as error:
            raise InvalidRequestError(str(error), param=wrong) from error
        digest = digest_of(directory)
        before = registry.get(name)
        if before is not None and (before.path, before.digest) == (str(directory), digest):
            self._requested.note(before, path, None if one is None else one.lora_int_id)
            return before
        while not registry.num_free and self._loading:
            self._wait()
        self._requested.make_room()
        adapter = registry.begin(
            name, str(directory), digest, in_place=True, created=int(time.time())
        )
        self._loading[adapter.slot] = adapter, one
        self._failed.pop(adapter.slot, None)
        try:
            self._engine.begin_adapter(adapter.slot, adapter.path, digest)
        except BaseException:
            del self._loading[adapter.slot]
            registry.cancel(adapter)
            raise
        while adapter.slot in self._loading:
            self._wait()
        if adapter.slot in self._failed:
            raise InvalidRequestError(
                f"the adapter {name!r} cannot be loaded: {self._failed[adapter.slot]}", param=wrong
            )
        return adapter

    def _wait(self) -> None:
        """Run one step, and note the loads that have ended."""
        self._steps.run()
        for slot, failure in self._engine.take_adapters():
            adapter, one = self._loading.pop(slot)
            if failure:
                self._failed[slot] = failure
                self._registry.cancel(adapter)
                continue
            self._registry.finish(adapter)
            path = self._lora.adapters[adapter.name] if one is None else one.lora_path
            self._requested.note(adapter, path, None if one is None else one.lora_int_id)


def _identity(one: LoRARequest) -> tuple[str, int, str]:
    return one.lora_name, one.lora_int_id, one.lora_path


def _one_each(
    asked: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> list[LoRARequest | None]:
    if asked is None or isinstance(asked, LoRARequest):
        return [asked] * count
    wanted = list(asked)
    if len(wanted) != count:
        raise InvalidRequestError(
            f"the list lora_request has length {len(wanted)}, and the list of prompts has length "
            f"{count}; give a list of the same length, or one LoRARequest for all prompts",
            param="lora_request",
        )
    for one in wanted:
        if one is not None and not isinstance(one, LoRARequest):
            raise InvalidRequestError(
                f"lora_request is a LoRARequest or a list of them, got {type(one).__name__}",
                param="lora_request",
            )
    return wanted
