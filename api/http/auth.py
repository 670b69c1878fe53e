"""ASGI middleware in front of all handlers: checks API keys and limits the requests of each key."""

from __future__ import annotations

from collections import Counter

from litestar.types import ASGIApp, Receive, Scope, Send

from ostinato.api.base.errors import OverloadedError
from ostinato.api.http.api_keys import KeyRing
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("AccessControl",)

# For balancers, supervisors and a browser that has no key yet.
_OPEN_PATHS = frozenset(("/", "/live", "/ready", "/health"))


class AccessControl:
    """Lets requests with a key through, and of each key so many at once.

    Args:
        app: what is protected.
        keys: of those who are let in.
        max_requests: of one key at once; None = no limit.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, max_requests: int | None) -> None:
        self._app = app
        self._keys = keys
        self._max_requests = max_requests
        self._running: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        key = self._keys.find(_key_of(dict(scope["headers"])))
        if key is None:
            raise InvalidRequestError(
                "the API key is missing or wrong: send one that this server knows as"
                " `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                status=401,
            )
        if scope["path"].startswith("/debug/"):  # to look is not to use
            await self._app(scope, receive, send)
            return
        if self._max_requests is not None and self._running[key] >= self._max_requests:
            raise OverloadedError(
                f"{self._running[key]} requests of this API key are running, which is"
                " server.max_requests_per_key; wait for one to end",
                code="too_many_requests",
                retry_after_s=1,
            )
        self._running[key] += 1
        try:
            # A stream's reply is sent within: its request counts until its end.
            await self._app(scope, receive, send)
        finally:
            self._running[key] -= 1


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith("/page/")  # the files of the page at /


def _key_of(headers: dict[bytes, bytes]) -> str:
    scheme, _, credentials = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and credentials:
        return credentials.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1")
