"""The HTTP/1.1 protocol of a connection: uvicorn's protocol with limits on what a client sends.

uvicorn and httptools accept headers, trailers and chunk extensions of any length, wait for them for
ever, and parse all received requests at once. `HttpProtocol` refuses a connection as soon as one of
the `ReceiveLimits` is exceeded, and does not store bytes beyond a limit. This module, not the
application, answers a request that is refused here.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ostinato.api.base.errors import error_body
from ostinato.api.base.request_context import new_request_id, request_id_headers
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("HttpProtocol", "ReceiveLimits")

# Bytes that are parsed before other connections are served. With the smallest chunks, parsing them
# takes 2 ms.
_SLICE = 16 << 10
# A refused client can still be sending. Closing at once would reset the connection before the
# client has read the answer. So the connection stays open for this long.
_LINGER_S = 2.0
# While nothing is read, the event loop does not notice that a client has disconnected. So the
# operating system is asked at this interval.
_LOOK_S = 0.5
# Linux has POLLRDHUP. Other systems report a disconnect only when both directions are closed.
_LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
# TCP keep-alive: after a minute without traffic, the system probes the other end of a connection,
# then every 10 s. The connection ends after six probes without an answer, or if the other end
# answers that it has no such connection. This finds machines that were switched off. It also finds
# a client that left so many unread bytes that its close does not arrive.
_KEEP_ALIVE = {
    name: value
    for name, value in {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}.items()
    if hasattr(socket, name)
}


class ReceiveLimits(NamedTuple):
    """Limits of what a client sends.

    `header_bytes` counts the request line, headers, trailers, and the bytes between the chunks of a
    body. `header_s` limits the time from when the server begins to wait for the headers until their
    last byte has arrived. `body_s` is the same limit for the body.
    """

    header_bytes: int
    header_s: float
    body_s: float
    num_connections: int

    @classmethod
    def of(cls, server: ServerConfig, num_connections: int) -> ReceiveLimits:
        """The limits of a configuration.

        Args:
            server: the section with the limits of bytes and seconds.
            num_connections: how many connections may be open at once.
        """
        return cls(
            int(server.max_header_kib * 1024),
            server.header_timeout_s,
            server.body_timeout_s,
            num_connections,
        )


class _Flow(FlowControl):
    """Tells the protocol when uvicorn pauses and resumes reading."""

    def __init__(
        self,
        transport: asyncio.Transport,
        on_pause: Callable[[], None],
        on_resume: Callable[[], None],
    ) -> None:
        super().__init__(transport)
        self._on_pause = on_pause
        self._on_resume = on_resume

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._on_pause()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._on_resume()


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        limits: the limits of what the client may send.
        count_refusal: called with the HTTP status of each refused request or connection.
        uvicorn: keyword arguments of uvicorn's protocol.
    """

    def __init__(
        self, *, limits: ReceiveLimits, count_refusal: Callable[[int], None], **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._count_refusal = count_refusal
        self._unparsed = bytearray()
        self._feeding: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None  # runs while the transport is paused
        self._answered: RequestResponseCycle | None = None  # the request that is being answered
        # Bytes received since the last of these events: the end of the previous request, the end of
        # the headers, a byte of the body.
        self._num_overhead = 0
        self._is_in_body = False  # the headers of the present request are complete, its body is not
        self._has_begun = False  # a part of the present request has arrived
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _keep_alive(transport.get_extra_info("socket"))
        self.flow = _Flow(transport, self._pause, self._read_on)
        if len(self.connections) > self._limits.num_connections:
            self._refuse_connection()
        else:
            self._start_timer(self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_watch()
        self._unparsed.clear()
        cycle = self._answered
        if cycle is not None and not cycle.response_complete:
            # uvicorn does this for the last request that it has read.
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._unparsed += data
        if self._feeding is None:
            self._feed()

    def _feed(self) -> None:
        """Parse the next part of the received bytes. The event loop calls it again for the rest.

        The rest waits while an earlier request has no answer, or while the handler has not read the
        received part of the body.
        """
        self._feeding = None
        if self._is_refused or self.transport.is_closing():
            return
        if not (self.flow.read_paused or self.pipeline):
            part = bytes(self._unparsed[:_SLICE])
            del self._unparsed[:_SLICE]
            self._parse(part)
        if self._unparsed:
            self._pause()
        self._read_on()

    def _read_on(self) -> None:
        if self.flow.read_paused or self.pipeline or self._feeding is not None:
            return
        if self._unparsed:
            self._feeding = self.loop.call_soon(self._feed)
        else:
            self._stop_watch()
            self.transport.resume_reading()

    def _pause(self) -> None:
        """Stop reading from the connection until `_read_on`. Watch for a disconnect meanwhile."""
        self.transport.pause_reading()
        if self._watch is None:
            self._watch = self.loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Close the connection if the client has closed its end."""
        self._watch = None
        if self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _LEFT)
        if poll.poll(0):
            self.transport.close()
        else:
            self._watch = self.loop.call_later(_LOOK_S, self._look)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _parse(self, data: bytes) -> None:
        limit = self._limits.header_bytes
        while data and not self._is_refused and self.parser is not None:
            room = limit - self._num_overhead
            if room <= 0:
                self._refuse(
                    431,
                    "the headers, or the trailers and chunk extensions of the body, are larger than"
                    f" server.max_header_kib={limit / 1024:g} KiB; send fewer or shorter ones",
                    "headers_too_large",
                )
                return
            part, data = data[:room], data[room:]
            self._num_overhead += len(part)
            super().data_received(part)

    def on_message_begin(self) -> None:
        self._has_begun = True
        if self._timer is None:
            self._start_timer(self._limits.header_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        self._num_overhead = 0
        self._stop_timer()
        super().on_headers_complete()
        self._start_timer(self._limits.body_s)

    def on_body(self, body: bytes) -> None:
        self._num_overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = self._has_begun = False
        self._num_overhead = 0
        self._stop_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._read_on()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are not a valid request."""
        self._refuse(
            400, "this is not a valid HTTP/1.1 request; the connection is closed", "invalid_http"
        )

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing. A request for a WebSocket is answered like a plain request."""

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._on_timeout, seconds)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self, seconds: float) -> None:
        self._timer = None
        if self._unparsed or self.pipeline or self.flow.read_paused:
            self._start_timer(seconds)  # the server has not read all received bytes
        elif self._is_in_body:
            text = f"the body was not complete after {seconds:g} s, server.body_timeout_s"
            self._refuse(408, text, "body_too_slow")
        elif self._has_begun:
            text = f"the headers were not complete after {seconds:g} s, server.header_timeout_s"
            self._refuse(408, text, "headers_too_slow")
        else:
            self.transport.close()  # a connection without a request

    def _refuse_connection(self) -> None:
        """Send a 503 before anything is read, and close at once to free the open file."""
        self._is_refused = True
        self._count_refusal(503)
        text = (
            f"the server has {self._limits.num_connections} open connections, which is its limit "
            "(ulimit -n minus the files that the server itself needs); try again later"
        )
        error = InvalidRequestError(text, code="too_many_connections", status=503)
        self.transport.write(_answer(error))
        self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Send an error without calling a handler, and close the connection.

        A handler that waits for the rest of a body sees a disconnect. If the response to an earlier
        request is being sent, it is completed, and no error is sent.
        """
        self._is_refused = True
        self._unparsed.clear()
        self._stop_timer()
        self._count_refusal(status)
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        if is_open and (self.pipeline or not self._is_in_body):
            cycle.keep_alive = False
            return
        may_answer = not self._is_in_body
        if is_open:
            may_answer = not cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        if may_answer:
            self.transport.write(_answer(InvalidRequestError(message, code=code, status=status)))
        self._stop_watch()
        self.transport.resume_reading()
        self.loop.call_later(_LINGER_S, self.transport.close)


def _keep_alive(connection: socket.socket) -> None:
    """Let the system probe whether the other end of a TCP connection is still there."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _answer(error: InvalidRequestError) -> bytes:
    """The bytes of an error response with `Connection: close`."""
    body = msgspec.json.encode(error_body(error))
    status = HTTPStatus(error.status)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *request_id_headers(new_request_id()),
    ]
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"", body])
