"""Measures how long `/health` takes to answer, in a process that does nothing else.

    python -m ostinato.benchmarks.soak.health_poll URL

Writes `ready`, polls until its stdin is closed, then writes the results as one line of JSON. Times
are those of `time.time()`.

A thread beside the polls sleeps for short times. A sleep that lasts much longer shows that the
machine gave this process no processor then. The server may have had none either.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import sys
import threading
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

__all__ = ("main",)

_POLL_S = 0.02
_ANSWER_S = 60.0
_SLEEP_S = 0.005
_PAUSE_S = 0.05  # a sleep that lasts this much too long is a pause of the machine


def _poll(address: tuple[str, int]) -> list[tuple[float, float, int]]:
    """(when, seconds, status) of each poll; status 0 = there was no answer."""
    polls: list[tuple[float, float, int]] = []
    connection = http.client.HTTPConnection(*address, timeout=_ANSWER_S)
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        at, begin = time.time(), time.perf_counter()
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        polls.append((at, time.perf_counter() - begin, status))
    connection.close()
    return polls


def _watch_sleeps(pauses: list[tuple[float, float]]) -> None:
    """Add (when, seconds) of each pause of the machine."""
    while True:
        at, begin = time.time(), time.perf_counter()
        time.sleep(_SLEEP_S)
        late = time.perf_counter() - begin - _SLEEP_S
        if late > _PAUSE_S:
            pauses.append((at, late))


def main(arguments: list[str]) -> int:
    """Poll until stdin is closed, and print the result; returns the exit code 0."""
    with suppress(PermissionError):
        os.nice(-5)  # so that the wait of this process for a processor is not measured
    address = urlsplit(arguments[0])
    pauses: list[tuple[float, float]] = []
    threading.Thread(target=_watch_sleeps, args=(pauses,), daemon=True).start()
    print("ready", flush=True)
    polls = _poll((address.hostname or "127.0.0.1", address.port or 80))
    result: dict[str, Any] = {"polls": polls, "pauses": pauses}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
