"""An ASGI middleware that checks the API key of a request and limits the requests of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from litestar.types import ASGIApp, Receive, Scope, Send

from ostinato.api.base.errors import OverloadedError
from ostinato.api.http.api_keys import KeyRing
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("OPEN", "AccessControl", "keep_counted")

# A route handler with this option in its `opt` needs no key.
OPEN = "open_without_key"
_USE = "ostinato.key_use"  # the entry in a request's scope that has its `_KeyUse`


class AccessControl:
    """Refuses requests without a valid key, and requests above a key's limit.

    A reply that is made in the background counts against the limit until it ends.

    Args:
        app: the protected application.
        keys: the valid keys.
        max_requests: how many requests of one key may run at once; None = no limit.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, max_requests: int | None) -> None:
        self._app = app
        self._keys = keys
        self._max_requests = max_requests
        self._running: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # OPTIONS needs no key, because browsers send it without one. Its answer only has the
        # methods of the path.
        if (
            scope["type"] != "http"
            or scope["method"] == "OPTIONS"
            or scope["route_handler"].opt.get(OPEN)
        ):
            await self._app(scope, receive, send)
            return
        key = self._keys.find(_key_of(dict(scope["headers"])))
        if key is None:
            raise InvalidRequestError(
                "the API key is missing or wrong: send a key of this server as"
                " `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                status=401,
            )
        if not _is_counted(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        if self._max_requests is not None and self._running[key] >= self._max_requests:
            raise OverloadedError(
                f"this API key has server.max_requests_per_key={self._max_requests} running"
                " requests; wait for one to end",
                code="too_many_requests",
                retry_after_s=1,
            )
        use = _KeyUse(self._running, key)
        scope[_USE] = use  # type: ignore[typeddict-unknown-key]
        try:
            # This call sends the whole stream, so the request counts until the stream ends.
            await self._app(scope, receive, send)
        finally:
            if not use.is_kept:
                use.end()


class _KeyUse:
    """One running request of a key."""

    def __init__(self, running: Counter[int], key: int) -> None:
        self._running = running
        self._key = key
        self.is_kept = False
        running[key] += 1

    def end(self) -> None:
        self._running[self._key] -= 1


def keep_counted(scope: Scope) -> Callable[[], None]:
    """Let a request count for its key until the returned function is called.

    This is for work that continues after the answer. It does nothing on a server without keys.
    """
    use: _KeyUse | None = scope.get(_USE)  # type: ignore[assignment]
    if use is None:
        return lambda: None
    use.is_kept = True
    return use.end


def _is_counted(method: str, path: str) -> bool:
    """Whether a request counts against the limit of its key.

    GET and HEAD do not count, and neither do requests that delete or cancel a stored reply. All
    other requests count, also a request that creates a stored reply.
    """
    return method not in ("GET", "HEAD", "DELETE") and not path.endswith("/cancel")


def _key_of(headers: dict[bytes, bytes]) -> str:
    scheme, _, credentials = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and credentials:
        return credentials.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1")
