"""Starts and stops the `run serve` process of the soak test; reads its memory and its log."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

import psutil

__all__ = ("SoakServer",)

_START_S = 600.0
_STOP_S = 60.0


class SoakServer:
    """A `run serve` process, and the log lines of it and its engine."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.process = psutil.Popen(
            [sys.executable, "-m", "ostinato", "serve", *overrides],
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
            RuntimeError: the server ended or took too long.
        """

        def ended() -> bool:
            return not self._reader.is_alive() or any("ready after" in line for line in self.lines)

        with self._line_added:
            self._line_added.wait_for(ended, _START_S)
        if not any("ready after" in line for line in self.lines):
            self.process.kill()
            raise RuntimeError(f"the server did not start:\n{''.join(self.lines)}")
        return next(line for line in self.lines if "answers 503 until" in line).split()[2]

    def num_fds(self) -> int:
        """Open files and sockets of the API process."""
        return self.process.num_fds()

    def rss_mib(self) -> dict[str, float]:
        """Memory of the API process and of the engine process."""
        sizes = {"api": self.process.memory_info().rss}
        for child in self.process.children():
            if "ostinato.runtime.process.engine_main" in child.cmdline():
                sizes["engine"] = child.memory_info().rss
        return {name: round(size / 2**20, 1) for name, size in sizes.items()}

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
        """Kill the server, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None, "stdout=PIPE"
        for line in self.process.stdout:
            with self._line_added:
                self.lines.append(line)
                self._line_added.notify_all()
        with self._line_added:
            self._line_added.notify_all()
