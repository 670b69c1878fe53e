"""Starts a server for a benchmark, and sends requests to it with Python's own HTTP client."""

from __future__ import annotations

import http.client
import json
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ("StartedServer", "first_token_s", "post_json", "started_server")

_START_S = 300.0


class StartedServer(NamedTuple):
    """A server that is ready."""

    port: int
    ready_s: float  # seconds from the start of its process


@contextmanager
def started_server(command: Sequence[str]) -> Iterator[StartedServer]:
    """A server process, from its readiness to its end by SIGTERM.

    Args:
        command: its command. PORT in a word stands for a free port.

    Raises:
        RuntimeError: it ended before it was ready, or was not ready within 300 s.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [word.replace("PORT", str(port)) for word in command]
    begin = time.monotonic()
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(words, stdout=log, stderr=log) as process,
    ):
        try:
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > begin + _START_S:
                    log.seek(0)
                    text = log.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"{shlex.join(words)} did not start: {text}")
                time.sleep(0.02)
            yield StartedServer(port, time.monotonic() - begin)
        finally:
            process.send_signal(signal.SIGTERM)


def post_json(port: int, path: str, body: Mapping[str, Any]) -> Any:
    """The answer to a request.

    Raises:
        RuntimeError: the status is not 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
    try:
        _send(connection, path, body)
        reply = connection.getresponse()
        content = json.loads(reply.read())
    finally:
        connection.close()
    if reply.status != 200:
        raise RuntimeError(f"{path} answered {reply.status}: {content}")
    return content


def first_token_s(port: int, path: str, body: Mapping[str, Any]) -> float:
    """Seconds until the first event of a streamed answer; the rest of the answer is read too.

    Raises:
        RuntimeError: the status is not 200, or there is no event.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
    begin = time.perf_counter()
    seconds = None
    try:
        _send(connection, path, {**body, "stream": True})
        reply = connection.getresponse()
        while line := reply.readline():
            if seconds is None and line.startswith(b"data:"):
                seconds = time.perf_counter() - begin
    finally:
        connection.close()
    if reply.status != 200 or seconds is None:
        raise RuntimeError(f"{path} answered {reply.status} without an event")
    return seconds


def _send(connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]) -> None:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
