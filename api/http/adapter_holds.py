"""Keeps the adapter of a request in its slot until the answer has been sent."""

from __future__ import annotations

from collections.abc import Callable

from litestar.types import ASGIApp, Receive, Scope, Send

from ostinato.api.observability.adapter_metrics import LoadedAdapters
from ostinato.runtime.types.adapters import ServedAdapter

__all__ = ("AdapterHolds", "hold_adapter", "keep_held")

_HOLD = "ostinato.adapter_hold"  # the entry in a request's scope that has its `_Hold`


class AdapterHolds:
    """An ASGI middleware that releases the adapter of a request at the end of the request.

    A handler returns before its stream is sent, and the stream of a client that has disconnected
    may never begin. So neither can release the adapter.

    Args:
        app: the application, whose handlers call `hold_adapter`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)  # this call sends the whole stream
        finally:
            hold = _hold_of(scope)
            if hold is not None and not hold.is_kept:
                hold.end()


class _Hold:
    """One adapter that one request keeps in its slot."""

    def __init__(self, loaded: LoadedAdapters, adapter: ServedAdapter) -> None:
        self._loaded = loaded
        self._adapter = adapter
        self.is_kept = False
        loaded.hold(adapter)

    def end(self) -> None:
        self._loaded.release(self._adapter)


def hold_adapter(scope: Scope, loaded: LoadedAdapters, name: str | None) -> ServedAdapter | None:
    """The adapter with this name, which the request now holds; None = there is no such adapter.

    Args:
        scope: the scope of the request, which `AdapterHolds` has received. Called once for it.
        loaded: the adapters.
        name: the `model` of the request.
    """
    adapter = None if name is None else loaded.get(name)
    if adapter is not None:
        scope[_HOLD] = _Hold(loaded, adapter)  # type: ignore[typeddict-unknown-key]
    return adapter


def keep_held(scope: Scope) -> Callable[[], None]:
    """Let a request hold its adapter until the returned function is called.

    This is for work that continues after the answer.
    """
    hold = _hold_of(scope)
    if hold is None:
        return lambda: None
    hold.is_kept = True
    return hold.end


def _hold_of(scope: Scope) -> _Hold | None:
    return scope.get(_HOLD)  # type: ignore[return-value]
