"""Runs a helper process of the soak test, which sends requests or measures, and prints JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ("SideProcess",)


class SideProcess:
    """A process with pipes as its stdin and stdout. Its last line of output is JSON.

    Args:
        name: the name of the process, in errors.
        command: its command line.
        directory: where it runs; None = the working directory of this process.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path | None = None) -> None:
        self._name = name
        self._process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Wait for the first line of the process.

        Raises:
            RuntimeError: the process ended.
        """
        assert self._process.stdout is not None, "stdout=PIPE"
        if not self._process.stdout.readline():
            raise RuntimeError(f"{self._name} did not start:\n{self._process.communicate()[1]}")

    def begin(self) -> None:
        """Send a line to the process."""
        assert self._process.stdin is not None, "stdin=PIPE"
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self, timeout_s: float) -> dict[str, Any]:
        """Close its stdin and wait for its end; returns the decoded last line of its output.

        Raises:
            RuntimeError: it failed.
            subprocess.TimeoutExpired: it takes longer than `timeout_s`.
        """
        output, errors = self._process.communicate(timeout=timeout_s)
        lines = output.splitlines()
        if self._process.returncode or not lines:
            raise RuntimeError(f"{self._name} ended with {self._process.returncode}:\n{errors}")
        return json.loads(lines[-1])

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
