"""A real `run serve` process on a free port, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

__all__ = ("HTTP", "SMALL", "ServerProcess")

# For all requests of a test process. `httpx.post` makes a client each time, and a client reads the
# machine's certificates for 20 ms.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 240  # twice the longest pause of a busy machine
# The smallest settings of the bundled model, with the shortest start. It runs on the CPU kernels, whose bits
# do not depend on the batch: tests compare tokens of requests that joined a batch at different steps.
SMALL = (
    "server.port=0",
    "graphs.mode=eager",
    "device.threads=1",
    "cache.memory_gib=0.05",
    "model.max_model_len=512",
)


class ServerProcess:
    """One server; `with ServerProcess(...) as server:` waits until it is ready.

    Args:
        overrides: more arguments of the command line.
        prefix: a command that executes the server's command in its place (tests/confinement.py).
        environment: variables that differ from those of this process; None removes one.

    Attributes:
        url: the address of the server.
        output: lines of standard output and standard error so far.
    """

    def __init__(
        self,
        *overrides: str,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        changed = {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "ostinato", "serve", *SMALL, *overrides],
            cwd=_ROOT,
            env={name: value for name, value in changed.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self.output: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self.wait_for_line("ready after")
            self.url = self.wait_for_line("answers 503 until").split()[2]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)
        self._reader.join(30)
        late = [line for line in self.output if "late compile" in line]
        assert not late, "the engine compiled after it was ready:\n" + "".join(late)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def engine(self) -> psutil.Process:
        """The engine process."""
        (child,) = [
            one
            for one in psutil.Process(self.pid).children()
            if "ostinato.runtime.process.engine_main" in one.cmdline()
        ]
        return child

    def wait_for_line(self, text: str) -> str:
        """The first line with `text`; waits for it while the process runs."""

        def found() -> str | None:
            return next((line for line in self.output if text in line), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._reader.is_alive(), _START_S)
            line = found()
        assert line is not None, f"no line with {text!r} in:\n" + "".join(self.output)
        return line

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 60) -> int:
        """The exit code."""
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def metrics(self) -> dict[str, float]:
        """All samples of `/metrics`; a name includes its labels as Prometheus writes them."""
        text = HTTP.get(f"{self.url}/metrics", timeout=30).text
        return {
            sample.name
            + "".join(f'{{{key}="{value}"}}' for key, value in sample.labels.items()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def log_of(self, request_id: str) -> str:
        """The log line of a finished request."""
        return re.sub(r"^\S+ \S+ \w+ ", "", self.wait_for_line(request_id)).rstrip()

    def _read(self, stream: IO[str] | None) -> None:
        assert stream is not None, "stdout=PIPE"
        for line in stream:
            with self._changed:
                self.output.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
