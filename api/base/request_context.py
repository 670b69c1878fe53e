"""Reads the headers of an HTTP request: request id, `traceparent`, time limit, `x-trace`."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from litestar import Request
from litestar.types import Scope

from ostinato.api.base.timeline import Timeline, TimelineBuilder
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.adapters import ServedAdapter

__all__ = (
    "ANTHROPIC_PATHS",
    "REQUEST_ID_HEADER",
    "REQUEST_ID_PATTERN",
    "TIMEOUT_HEADER",
    "RequestContext",
    "context_of",
    "new_request_id",
    "request_id_headers",
    "request_id_of",
)

ANTHROPIC_PATHS = "/v1/messages"  # prefix of the paths that answer in Anthropic's format
REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_PATTERN = r"^[\x21-\x7e]{1,128}$"
TIMEOUT_HEADER = "x-request-timeout-ms"
MAX_TIMEOUT_MS = 24 * 3600 * 1000
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_STATE_KEY = "ostinato_request_id"


class RequestContext:
    """Facts about an HTTP request that its metrics, log line and trace need.

    Args:
        endpoint: the path.
        wants_timeline: whether the answer includes a timeline.
        traceparent: the W3C header; empty = none.

    Attributes:
        arrived_at: time of arrival, in seconds of time.monotonic().
        timeline: collects the events of the request; None = the request asks for no timeline.
        grammar: the compiled constraint of the request, as text; empty = none, or not compiled yet.
        constraint_field: the field of the request that has the constraint.
        grammar_seconds: how long the request waited for its grammar.
        timeout_ms: time limit of the answer, counted from the arrival; None = no limit.
        request_id: the request id, from the header or random; empty = none.
        adapter: the adapter that the request names as its model; None = it names the served model.
    """

    def __init__(
        self,
        endpoint: str = "",
        *,
        wants_timeline: bool = False,
        traceparent: str = "",
        timeout_ms: float | None = None,
        request_id: str = "",
    ) -> None:
        self.endpoint = endpoint
        self.request_id = request_id
        self.traceparent = traceparent
        self.arrived_at = time.monotonic()
        self.timeout_ms = timeout_ms
        self.grammar = ""
        self.constraint_field = "structured_outputs"
        self.grammar_seconds = 0.0
        self.adapter: ServedAdapter | None = None
        self.timeline = TimelineBuilder(self.arrived_at) if wants_timeline else None

    def report(self) -> Timeline | msgspec.UnsetType:
        """The timeline so far; UNSET if the request asks for no timeline."""
        if self.timeline is None:
            return msgspec.UNSET
        return self.timeline.report(self.grammar_seconds)


def context_of(endpoint: str, request: Request[Any, Any, Any]) -> RequestContext:
    """The context of a request that has just arrived.

    Raises:
        InvalidRequestError: `x-trace` is neither 0 nor 1, the timeout is out of range, or the
            request id is not 1 to 128 visible ASCII characters.
    """
    headers = request.headers
    wanted = headers.get("x-trace", "0").strip()
    if wanted not in ("0", "1"):
        raise InvalidRequestError(
            f"the header x-trace is {wanted[:20]!r}; it must be 1 (a timeline in the answer) or 0",
            param="x-trace",
            code="invalid_value",
        )
    given = headers.get(REQUEST_ID_HEADER, "")
    if given and not _is_request_id(given):
        raise InvalidRequestError(
            f"the header {REQUEST_ID_HEADER} is {given[:40]!r}; it must be 1 to 128 visible ASCII"
            " characters",
            param=REQUEST_ID_HEADER,
            code="invalid_value",
        )
    return RequestContext(
        endpoint,
        wants_timeline=wanted == "1",
        traceparent=headers.get("traceparent", ""),
        timeout_ms=_timeout_ms(headers),
        request_id=request_id_of(request.scope),
    )


def request_id_of(scope: Scope) -> str:
    """The id of an HTTP request: its header `x-request-id`, else a random id, which is drawn once.

    A header that is not valid counts as missing.
    """
    given = dict(scope["headers"]).get(REQUEST_ID_HEADER.encode(), b"").decode("latin-1")
    if _is_request_id(given):
        return given
    state = scope.setdefault("state", {})
    return state.setdefault(_STATE_KEY, new_request_id())


def new_request_id() -> str:
    """A random request id of 32 hexadecimal digits."""
    return secrets.token_hex(16)


def request_id_headers(request_id: str, path: str = "") -> list[tuple[bytes, bytes]]:
    """The response headers that carry the request id.

    Args:
        request_id: visible ASCII.
        path: path of the endpoint. Anthropic's clients read another header than OpenAI's clients.
    """
    value = request_id.encode()
    headers = [(REQUEST_ID_HEADER.encode(), value)]
    if path.startswith(ANTHROPIC_PATHS):
        headers.append((b"request-id", value))
    return headers


def _is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


def _timeout_ms(headers: Mapping[str, str]) -> float | None:
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_ms = float(text)
    except ValueError:
        timeout_ms = math.nan
    if not 1 <= timeout_ms <= MAX_TIMEOUT_MS:
        raise InvalidRequestError(
            f"the header {TIMEOUT_HEADER} is {text[:20]!r}; it must be milliseconds in"
            f" [1, {MAX_TIMEOUT_MS}]",
            param=TIMEOUT_HEADER,
            code="invalid_value",
        )
    return timeout_ms
