"""`ReplicaAdapters`: the adapters of a replica's engine, which its next engine gets too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ostinato.runtime.errors import EngineDeadError, InvalidRequestError
from ostinato.runtime.replicas.engine_calls import EngineCalls
from ostinato.runtime.types.adapters import ServedAdapter

__all__ = ("ReplicaAdapters",)

_LOG = logging.getLogger(__name__)
_MOST_DEATHS = 2  # ends of an engine while an adapter is loaded, before its load is given up


class ReplicaAdapters:
    """Loads adapters into a replica's engine, and into the next one after a restart.

    Args:
        name: the replica's name, for the log.
        calls: the calls to the replica's engine.
        wait_until_alive: returns when the engine serves. Raises EngineDeadError if the engine is
            not started again.
    """

    def __init__(
        self, name: str, calls: EngineCalls, wait_until_alive: Callable[[], Awaitable[None]]
    ) -> None:
        self._name = name
        self._calls = calls
        self._wait_until_alive = wait_until_alive
        self._loaded: dict[int, ServedAdapter] = {}  # by slot
        self._again: list[tuple[ServedAdapter, asyncio.Future[str]]] = []

    async def load(self, adapter: ServedAdapter) -> None:
        """Load an adapter into the engine, and from now on into each engine after a restart.

        An engine that has the adapter keeps it as it is.

        If the engine ends meanwhile, the next engine loads it. If that ends too, the load is given
        up, because the adapter can be the cause.

        Args:
            adapter: no request uses another adapter in its slot.

        Raises:
            InvalidRequestError: the engine cannot load it.
            EngineDeadError: the engine is not started again, or the load is given up.
        """
        if self._loaded.get(adapter.slot) == adapter:
            return
        self._loaded.pop(adapter.slot, None)
        for number in range(_MOST_DEATHS):
            await self._wait_until_alive()
            try:
                await (await self._calls.begin_load(adapter))
            except EngineDeadError as error:
                if number + 1 == _MOST_DEATHS:
                    raise EngineDeadError(
                        f"the engine ended {_MOST_DEATHS} times while it loaded the adapter "
                        f"{adapter.name!r} from {adapter.path}, and the load is given up; the "
                        f"last time: {error}"
                    ) from error
            except InvalidRequestError as error:  # the fault is in the request for the load
                raise InvalidRequestError(
                    str(error), param="lora_path", code="invalid_value"
                ) from error
            else:
                self._loaded[adapter.slot] = adapter
                return

    def forget(self, adapter: ServedAdapter) -> None:
        """Do not load an adapter into further engines. No request uses it any more."""
        if self._loaded.get(adapter.slot) == adapter:
            del self._loaded[adapter.slot]

    async def begin_again(self) -> None:
        """Ask a new engine to load all adapters that the engine before it had."""
        self._again = []
        for adapter in list(self._loaded.values()):
            self._again.append((adapter, await self._calls.begin_load(adapter)))

    @property
    def all_answered(self) -> bool:
        """Whether all loads that `begin_again` asked for have ended."""
        return all(reply.done() for _, reply in self._again)

    def end_again(self) -> None:
        """Log the adapters that the new engine could not load. It refuses their requests."""
        again, self._again = self._again, []
        for adapter, reply in again:
            error = reply.exception() if reply.done() else None
            if isinstance(error, InvalidRequestError):
                self.forget(adapter)
                _LOG.error(
                    "%s was started again, could not load the adapter %r, and refuses its "
                    "requests: %s",
                    self._name,
                    adapter.name,
                    error,
                )
