"""Drives llama.cpp's server on the loopback: `drive_llamacpp.py SERVER GGUF THREADS [OPTION ...]`.

The options are those of the server, such as `--spec-type ngram-simple`. The server divides its
context among its slots. So it is restarted with one slot for each request of a part. A single
stream is fastest with one slot. The measured times do not include the starts.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from driver_loop import Requests, serve

__all__ = ("load",)

_START_S = 120.0


class Server:
    """One llama-server process with a number of slots."""

    def __init__(self, slots: int, context: int) -> None:
        self.slots, self.context = slots, context
        binary, gguf, threads, *more = sys.argv[1:]
        with socket.create_server(("127.0.0.1", 0)) as free:  # several drivers run at once
            self._port = free.getsockname()[1]
        self._process = subprocess.Popen(
            [
                *(binary, "-m", gguf, "-t", threads, "-tb", threads),
                *("--host", "127.0.0.1", "--port", str(self._port)),
                *("-np", str(slots), "-c", str(slots * context)),
                *more,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("llama-server did not start; run its command by hand to see why")
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def complete(self, prompt: list[int], count: int) -> int:
        body = {
            "prompt": prompt,
            "n_predict": count,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": True,
            "stream": False,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=900)
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        return int(json.loads(connection.getresponse().read())["tokens_predicted"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def load() -> Callable[[Requests], list[int]]:
    """Load the engine; returns a function from requests to their numbers of output tokens."""
    server = Server(1, 2048)
    pool = ThreadPoolExecutor(64)

    def prepare(requests: Requests) -> None:
        nonlocal server
        slots = len(requests)
        context = max(2048 if slots == 1 else 0, *(len(prompt) + n for prompt, n in requests))
        if server.slots != slots or server.context < context:
            server.close()
            server = Server(slots, context + 64)

    def run(requests: Requests) -> list[int]:
        return list(pool.map(lambda request: server.complete(*request), requests))

    run.prepare = prepare  # type: ignore[attr-defined]
    return run


if __name__ == "__main__":
    serve(load)
