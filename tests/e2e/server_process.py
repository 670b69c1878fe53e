"""A real `run serve` process on a free port, as a user starts it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import PATIENCE_S, wait_until

__all__ = ("HTTP", "SMALL", "ServerProcess", "engine_of")

# For all requests of a test process. `httpx.post` makes a client each time, and a client reads the
# machine's certificates for 20 ms.
HTTP = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None))

_ROOT = Path(__file__).resolve().parents[2]
# The settings of the bundled model with the least memory and the shortest start. The server uses
# the CPU kernels. The bits of their results do not depend on the batch, and tests rely on this:
# they compare tokens of requests that joined a batch at different steps.
SMALL = (
    "server.port=0",
    "graphs.mode=eager",
    "device.threads=1",
    "cache.memory_gib=0.05",
    "model.max_model_len=512",
    # Without drafts each event of a stream has one token, so tests can compare events.
    "speculation.method=none",
)


def engine_of(server_pid: int) -> psutil.Process:
    """The engine process of a server, which may have other children for a moment."""
    engines = []
    for one in psutil.Process(server_pid).children():
        with suppress(psutil.Error):  # it has ended
            if "ostinato.runtime.process.engine_main" in one.cmdline():
                engines.append(one)
    (engine,) = engines
    return engine


@contextmanager
def _suspended(process: psutil.Process) -> Iterator[None]:
    """A context in which all threads of a process are stopped, which they are one by one."""
    process.suspend()
    try:
        wait_until(lambda: _has_stopped(process.pid), "the process does not stop")
        yield
    finally:
        with suppress(psutil.NoSuchProcess):  # the test or the server may have ended it
            process.resume()


def _has_stopped(pid: int) -> bool:
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # a thread has ended meanwhile
        return False
    return all(") T " in stat for stat in stats)


class ServerProcess:
    """One server; `with ServerProcess(...) as server:` waits until it is ready.

    Args:
        overrides: more arguments of the command line.
        prefix: words before the server's command, which confine it (tests/confinement.py).
        environment: variables that differ from those of this process; the value None removes one.

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
        self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        late = [line for line in self.output if "late compile" in line]
        assert not late, "the engine compiled after it was ready:\n" + "".join(late)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def engine(self) -> psutil.Process:
        """The engine process."""
        return engine_of(self.pid)

    def wait_for_line(self, text: str) -> str:
        """The first line with `text`; waits for it while the process runs."""

        def found() -> str | None:
            return next((line for line in self.output if text in line), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._reader.is_alive(), PATIENCE_S)
            line = found()
        assert line is not None, f"no line with {text!r} in:\n" + "".join(self.output)
        return line

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of the process; returns its exit code."""
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def metrics(self) -> dict[str, float]:
        """All samples of `/metrics`; a name includes its labels as Prometheus writes them."""
        text = HTTP.get(f"{self.url}/metrics").text
        return {
            sample.name
            + "".join(f'{{{key}="{value}"}}' for key, value in sample.labels.items()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def load(self) -> int:
        """The number of requests that the server has sent to the engine and that have not ended."""
        return HTTP.get(f"{self.url}/load").json()["server_load"]

    @contextmanager
    def held_engine(self) -> Iterator[None]:
        """Suspend the engine, so that no request advances, however slow or quick the machine is."""
        with _suspended(self.engine):
            yield

    @contextmanager
    def held_preparation(self) -> Iterator[None]:
        """Suspend the process that prepares large bodies."""
        (process,) = [
            one
            for one in psutil.Process(self.pid).children()
            if "ostinato.api.server.preparation_main" in one.cmdline()
        ]
        with _suspended(process):
            yield

    def has_engine(self) -> bool:
        """Whether there is an engine process, which may still be starting."""
        try:
            return self.engine.is_running()
        except (ValueError, psutil.Error):
            return False

    def kill_busy_engine(self) -> bool:
        """Kill the engine, and wait for its end. Returns False, and kills none, if it has no work.

        The engine is suspended before the server is asked for its load. So the last request cannot
        end between the two.
        """
        wait_until(self.has_engine, "no engine has been started")
        engine = self.engine
        engine.suspend()
        if self.load() == 0:
            engine.resume()
            return False
        engine.kill()
        engine.wait(PATIENCE_S)
        return True

    def num_restarts(self) -> float:
        """The restarts of all engines, for any reason."""
        name = "ostinato_engine_restarts_total"
        return sum(value for key, value in self.metrics().items() if key.startswith(name))

    def send(self, path: str, body: Any, request_id: str) -> http.client.HTTPConnection:
        """Send a request on a connection of its own."""
        address = urlsplit(self.url)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", path, json.dumps(body), headers)
        return connection

    @contextmanager
    def sent(self, path: str, body: Any, request_id: str) -> Iterator[http.client.HTTPConnection]:
        """Send a request, and wait until `load` counts it. The connection is closed at the end.

        Use `held_engine` around it. Otherwise the request may end before `load` counts it.
        """
        before = self.load()
        with closing(self.send(path, body, request_id)) as connection:
            wait_until(lambda: self.load() > before, f"{path} was not sent to the engine")
            yield connection

    def log_of(self, request_id: str) -> str:
        """The first log line with this id, without its time and level; waits for it."""
        return re.sub(r"^\S+ \S+ \w+ ", "", self.wait_for_line(request_id)).rstrip()

    def _read(self, stream: IO[str] | None) -> None:
        assert stream is not None, "stdout=PIPE"
        for line in stream:
            with self._changed:
                self.output.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
