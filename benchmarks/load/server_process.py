"""Starts a `run serve` process with a given configuration, for measurements over HTTP.

    python -m ostinato.benchmarks.load.server_process < config.json

The program reads a resolved configuration from standard input, so no override needs quoting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Mapping
from typing import Self

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ostinato.conf.root import RunConfig
from ostinato.runtime.early_start.early_engine import EarlyEngine
from ostinato.runtime.errors import StartupError

__all__ = ("Server",)

_START_S = 600.0
_STOP_S = 60.0
_ANSWER_S = 60.0
_READY = "ready after"
_LOG_LINES = 20


class Server:
    """One server on a free port; `with Server(config) as server:` waits until it is ready.

    Args:
        config: the server's configuration; its port and log level are replaced.
        environment: environment of the server's process; None = that of this process.

    Attributes:
        url: the URL of the server.
        ready_s: seconds from the start of the process until it was ready.

    Raises:
        StartupError: the server ended or took too long; the text has the end of its log.
    """

    def __init__(self, config: RunConfig, *, environment: Mapping[str, str] | None = None) -> None:
        section = dataclasses.replace(config.server, port=0, log_level="warning")
        self._config = dataclasses.replace(config, server=section)
        self._environment = None if environment is None else dict(environment)
        self.url = ""
        self.ready_s = 0.0
        self._log: deque[str] = deque(maxlen=_LOG_LINES)

    def __enter__(self) -> Self:
        begin = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ostinato.benchmarks.load.server_process"],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, name="server-log", daemon=True)
        self._reader.start()
        assert self._process.stdin is not None, "stdin=PIPE"
        try:
            # The pipe stays open. Its end tells the server that this process has ended.
            self._process.stdin.write(msgspec.json.encode(self._config).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended at once; its log says why
        self._ready.wait(_START_S)
        self.ready_s = time.monotonic() - begin
        if not self.url or self._process.poll() is not None:
            self.__exit__()
            raise StartupError(
                f"the server did not start: {' '.join(self._log).strip() or 'its log is empty'}"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None, "stdin=PIPE"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._reader.join(5)

    def startup_phases(self) -> dict[str, float]:
        """Seconds of each phase of the start without `ready`, as the server reports them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=_ANSWER_S) as reply:
            text = reply.read().decode()
        return {
            sample.labels["phase"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "ostinato_startup_seconds" and sample.labels["phase"] != "ready"
        }

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None, "stdout=PIPE"
        url = ""
        for line in self._process.stdout:
            if not url and "answers 503 until" in line:
                url = line[line.index("http://") :].split()[0]
            elif line.startswith(_READY):
                self.url = url
                self._ready.set()
            elif line.strip() and not line.startswith("  "):
                self._log.append(line.strip())
        self._ready.set()


def _end_with_parent() -> None:
    """Drain and end when standard input ends, because the parent process has ended."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Serve the configuration on standard input."""
    with EarlyEngine() as early:
        from ostinato.api.server.server import serve

        config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RunConfig)
        threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
        try:
            return serve(config, early)
        except StartupError as error:
            print(error, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
