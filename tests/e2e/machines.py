"""A simulated second machine: a network namespace with a virtual cable, and `run rank` in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Self

import psutil
import pytest

__all__ = ("Namespace", "RankProcess", "join_command", "lives")


def lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def join_command(line: str) -> list[str]:
    """The address and the token of the command `run rank ADDRESS TOKEN` that a server logs."""
    found = re.search(r"run rank (tcp://\S+) (\w+)", line)
    assert found is not None, line
    return [found[1], found[2]]


class Namespace:
    """A network namespace, joined to this machine by a pair of virtual network devices (the cable).

    The test is skipped where the system allows no namespace.

    Attributes:
        host: this machine's address on the cable.
        prefix: words before a command that is to run inside the namespace.
    """

    def __init__(self) -> None:
        number = os.getpid()
        self._name, self._link = f"ost-{number}", f"ost{number}"
        subnet = f"10.213.{number % 250}"
        self.host = f"{subnet}.1"
        self.prefix = ["ip", "netns", "exec", self._name]
        if shutil.which("ip") is None:
            pytest.skip("the program ip is not installed")
        try:
            self._ip("netns", "add", self._name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"the system allows no network namespace: {error.stderr.strip()}")
        peer = f"{self._link}p"
        self._ip(
            "link", "add", self._link, "type", "veth", "peer", "name", peer, "netns", self._name
        )
        self._ip("addr", "add", f"{self.host}/24", "dev", self._link)
        self._ip("-n", self._name, "addr", "add", f"{subnet}.2/24", "dev", peer)
        self._ip("-n", self._name, "link", "set", peer, "up")
        self.plug(is_in=True)

    def plug(self, *, is_in: bool) -> None:
        """Put the cable in or pull it out."""
        self._ip("link", "set", self._link, "up" if is_in else "down")

    def close(self) -> None:
        # Delete the cable first: a namespace keeps its end of the cable until its last process has
        # ended.
        self._ip("link", "del", self._link)
        self._ip("netns", "del", self._name)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class RankProcess:
    """A `run rank` process; its output is shown when a test fails."""

    def __init__(self, words: Sequence[str], prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "ostinato", "rank", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def wait(self, timeout_s: float = 60) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None, "stdout=PIPE"
        for line in self.process.stdout:
            self.output.append(line)
            sys.stdout.write(line)
