"""Counts the requests that the server has admitted and not answered yet."""

from __future__ import annotations

from litestar.types import ASGIApp, Receive, Scope, Send

from ostinato.api.service.admission import Admission

__all__ = ("AdmittedRequests", "count_admitted")

_IS_ADMITTED = "ostinato.is_admitted"  # the entry in the scope of a request that is counted


class AdmittedRequests:
    """An ASGI middleware that ends the count of a request when its answer has been sent.

    A handler returns before its stream is sent, so it cannot end the count.

    Args:
        app: the application, whose handlers call `count_admitted`.
        admission: has the count.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)  # this call sends the whole stream
        finally:
            if _IS_ADMITTED in scope:
                self._admission.num_admitted -= 1


def count_admitted(scope: Scope, admission: Admission) -> None:
    """Count a request as admitted until its answer has been sent.

    Args:
        scope: the scope of the request, which `AdmittedRequests` has received.
        admission: has admitted the request.
    """
    if _IS_ADMITTED not in scope:
        scope[_IS_ADMITTED] = True  # type: ignore[typeddict-unknown-key]
        admission.num_admitted += 1
