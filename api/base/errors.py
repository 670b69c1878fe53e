"""HTTP errors: the status, the JSON body and the headers of every failure of the API.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`. Under `/v1/messages` it is
Anthropic's: `{"type": "error", "error": {"type", "message"}, "request_id"}`. Errors that Litestar
raises, such as 404, 405 and 413, get the same bodies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException

from ostinato.api.base.request_context import ANTHROPIC_PATHS, request_id_of
from ostinato.api.base.unsupported_endpoints import hint_for
from ostinato.runtime.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    HelperProcessError,
    InvalidRequestError,
)

__all__ = (
    "ClientGoneError",
    "ErrorBody",
    "ErrorDetail",
    "OverloadedError",
    "TypedErrorBody",
    "UnavailableError",
    "error_body",
    "error_response",
    "exception_handlers",
    "status_of",
    "typed_error_body",
)

_LOG = logging.getLogger("ostinato.api")


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class RetryLaterError(EngineError):
    """The server cannot take or finish a request now. A later try can succeed.

    Args:
        message: describes the state of the server.
        code: the code of the error.
        retry_after_s: seconds for the `Retry-After` header.
    """

    def __init__(self, message: str, *, code: str, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class UnavailableError(RetryLaterError):
    """The server starts, ends or has failed.

    The code is `starting`, `restarting`, `shutting_down`, `engine_dead`, `engine_silent`,
    `helper_process` or `aborted`.
    """


class OverloadedError(RetryLaterError):
    """A limit on queued or running requests is reached; the message has it and the present value.

    The code is `queue_full` or `too_many_requests`.
    """


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


def status_of(error: Exception) -> int:
    """The HTTP status of a response for `error`."""
    if isinstance(error, InvalidRequestError):
        return error.status
    if isinstance(error, UnavailableError | EngineDeadError | HelperProcessError):
        return 503
    if isinstance(error, OverloadedError):
        return 429
    if isinstance(error, DeadlineError):
        return 504
    if isinstance(error, HTTPException):
        return error.status_code
    return 499 if isinstance(error, ClientGoneError) else 500


def error_body(error: Exception) -> ErrorBody:
    """The OpenAI error object for any exception. The text of unexpected exceptions is left out."""
    message, param, code = str(error), None, "engine_error"
    if isinstance(error, InvalidRequestError):
        param, code = error.param, error.code or "invalid_value"
    elif isinstance(error, RetryLaterError):
        code = error.code
    elif isinstance(error, DeadlineError):
        code = "deadline_exceeded"
    elif isinstance(error, EngineDeadError):
        code = "engine_dead"
    elif isinstance(error, HelperProcessError):
        code = "helper_process"
    elif not isinstance(error, EngineError):
        message = "an unexpected error; the server's log has the details"
        code = "internal_error"
    kind = "invalid_request_error" if status_of(error) < 500 else "server_error"
    if isinstance(error, OverloadedError):
        kind = "rate_limit_error"
    return ErrorBody(ErrorDetail(message=message, type=kind, param=param, code=code))


class TypedErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class TypedErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The Anthropic error object."""

    type: str = "error"
    error: TypedErrorDetail
    request_id: str | msgspec.UnsetType = msgspec.UNSET  # UNSET in the events of a stream


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def typed_error_body(
    error: Exception, request_id: str | msgspec.UnsetType = msgspec.UNSET
) -> TypedErrorBody:
    """The Anthropic error object for any exception; see `error_body`."""
    kind = _TYPES.get(status_of(error), "invalid_request_error")
    detail = TypedErrorDetail(kind, error_body(error).error.message)
    return TypedErrorBody(error=detail, request_id=request_id)


def error_response(error: Exception, request: Request[Any, Any, Any]) -> Response[bytes]:
    """The response to a request that failed with `error`."""
    body: msgspec.Struct = error_body(error)
    if request.url.path.startswith(ANTHROPIC_PATHS):
        body = typed_error_body(error, request_id_of(request.scope))
    headers = {}
    if isinstance(error, RetryLaterError):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, HelperProcessError):
        headers["Retry-After"] = "5"
    if isinstance(error, DeadlineError):
        headers["x-should-retry"] = "false"  # without it, OpenAI's clients repeat a 504
    if status_of(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(body),
        status_code=status_of(error),
        media_type="application/json",
        headers=headers,
    )


Handler = Callable[[Request[Any, Any, Any], Exception], Response[bytes]]


def exception_handlers(body_limit: str) -> dict[int | type[Exception], Handler]:
    """The exception handlers for Litestar: for Litestar's own errors, and for all other errors.

    Args:
        body_limit: the setting that limits a body and its value, for the text of the 413.
    """

    def on_framework_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        assert isinstance(error, HTTPException), "registered for HTTPException only"
        if error.status_code >= 500:
            return on_error(request, error)
        message, code = _explain(request, error, body_limit)
        param = None
        # A query parameter of the wrong type.
        if error.status_code == 400 and isinstance(error.extra, list) and error.extra:
            param = error.extra[0].get("key")
            message = f"{param}: {error.extra[0].get('message')}"
        refusal = InvalidRequestError(message, param=param, code=code, status=error.status_code)
        response = error_response(refusal, request)
        response.headers.update(error.headers or {})
        return response

    def on_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        if status_of(error) == 500:
            _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(error, request)

    return {HTTPException: on_framework_error, Exception: on_error}


def _explain(
    request: Request[Any, Any, Any], error: HTTPException, body_limit: str
) -> tuple[str, str]:
    """(message, code) for an error of Litestar.

    The messages of 404, 405 and 413 name a remedy. Other errors keep Litestar's text.
    """
    place = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        hint = hint_for(request.url.path) or "GET /schema lists the endpoints"
        return f"there is no {place}; {hint}", "not_found"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("allow", "another method")
        text = f"{request.url.path} does not take {request.method}; use {allowed}"
        return text, "method_not_allowed"
    if error.status_code == 413:
        return f"the body is larger than {body_limit}; send a smaller one", "body_too_large"
    return error.detail, "invalid_value"
