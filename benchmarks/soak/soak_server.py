"""The `run serve` process that the soak test loads: its start, its resources, its log, its end."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ("Resources", "SoakServer")

_START_S = 600.0
_STOP_S = 60.0


class Resources(NamedTuple):
    """Numbers of files, threads and processes of the server at one time."""

    fds: int  # open files and sockets of the API process
    engine_fds: int
    threads: int  # threads of the API process
    engine_threads: int
    processes: int  # children of the API process and their children
    temporary_files: int


class SoakServer:
    """`run serve` in a process of its own, with the lines that it and its engine write.

    Its temporary files are in a directory of its own, so that they can be counted.
    """

    def __init__(self, overrides: Sequence[str]) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="soak-")
        serve = (sys.executable, "-m", "ostinato", "serve")
        self.process = psutil.Popen(
            # `env` replaces itself by the server, so this is the server's process.
            ["env", f"TMPDIR={self._temporary.name}", *serve, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self.lines: list[str] = []
        self._line_added = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> str:
        """Wait until the server is ready; returns its URL.

        Raises:
            RuntimeError: the server ended, or took too long.
        """

        def ended() -> bool:
            return not self._reader.is_alive() or any("ready after" in line for line in self.lines)

        with self._line_added:
            self._line_added.wait_for(ended, _START_S)
        if not any("ready after" in line for line in self.lines):
            self.process.kill()
            raise RuntimeError(f"the server did not start:\n{''.join(self.lines)}")
        return next(line for line in self.lines if "answers 503 until" in line).split()[2]

    def resources(self) -> Resources:
        """The server's present resources; zeros for an engine that does not run."""
        engine_fds = engine_threads = 0
        with suppress(psutil.Error):
            engine = self._engine()
            if engine is not None:
                engine_fds, engine_threads = engine.num_fds(), engine.num_threads()
        return Resources(
            fds=self.process.num_fds(),
            engine_fds=engine_fds,
            threads=self.process.num_threads(),
            engine_threads=engine_threads,
            processes=len(self.process.children(recursive=True)),
            temporary_files=sum(1 for _ in Path(self._temporary.name).rglob("*")),
        )

    def rss_mib(self) -> dict[str, float]:
        """Memory of the API process and of the engine process."""
        sizes = {"api": self.process.memory_info().rss}
        with suppress(psutil.Error):
            engine = self._engine()
            if engine is not None:
                sizes["engine"] = engine.memory_info().rss
        return {name: round(size / 2**20, 1) for name, size in sizes.items()}

    def kill_engine(self) -> bool:
        """Kill the engine process. Returns False if no engine runs."""
        with suppress(psutil.Error):
            engine = self._engine()
            if engine is not None:
                engine.kill()
                return True
        return False

    def stop(self) -> int:
        """Ask the server to end; returns its exit code, -9 if it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(_STOP_S)
        except psutil.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(_STOP_S)
        return code

    def kill(self) -> None:
        """Kill the server, if it still runs, and remove its temporary files."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._temporary.cleanup()

    def _engine(self) -> psutil.Process | None:
        for child in self.process.children():
            with suppress(psutil.Error):
                if "ostinato.runtime.process.engine_main" in child.cmdline():
                    return child
        return None

    def _read(self) -> None:
        assert self.process.stdout is not None, "stdout=PIPE"
        for line in self.process.stdout:
            with self._line_added:
                self.lines.append(line)
                self._line_added.notify_all()
        with self._line_added:
            self._line_added.notify_all()
