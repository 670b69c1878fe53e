"""The HTTP/1.1 protocol of a connection: uvicorn's, with this API's answer to what is not HTTP.

A request that the parser refuses never reaches the application, so its answer is written here.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ostinato.api.base.errors import error_body
from ostinato.api.base.request_context import new_request_id, request_id_headers
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("HttpProtocol",)


class HttpProtocol(HttpToolsProtocol):
    """Answers with the OpenAI error object and a request id where uvicorn answers with a text."""

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are not a valid request."""
        self.refuse(
            InvalidRequestError(
                "this is not a valid HTTP/1.1 request; the server can not read on",
                code="invalid_http",
            )
        )

    def refuse(self, error: InvalidRequestError) -> None:
        """Write the answer for `error` and close the connection."""
        body = msgspec.json.encode(error_body(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *request_id_headers(new_request_id()),
        ]
        status = HTTPStatus(error.status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """A request for a WebSocket is answered as one without it, so nothing is logged."""
