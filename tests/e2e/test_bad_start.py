"""A server that cannot start says why in one clear line, and its exit code is not 0.

A signal during a start ends the server at once, without leftovers. Other commands print the same
lines about models that cannot be opened: tests/api/cli/test_terminal_commands.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.confinement import few_files, no_temporary_files, without_privileges
from tests.e2e.server_process import SMALL, engine_of
from tests.waiting import PATIENCE_S

DEMO = Path(__file__).parents[2] / "models" / "demo"


class Case(NamedTuple):
    """A start that cannot succeed."""

    override: str
    prefix: Callable[[], list[str]] = list  # words before the command; the call may skip the test


def write_models(root: Path) -> dict[str, str]:
    """Write a model with half its weights, and an unreadable one; returns name -> override."""
    for name in ("truncated", "locked"):
        (root / name).mkdir()
    for file in DEMO.glob("*.json"):
        shutil.copy(file, root / "truncated")
    weights = (DEMO / "model.safetensors").read_bytes()
    (root / "truncated" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    shutil.copy(DEMO / "config.json", root / "locked")
    (root / "locked").chmod(0)
    return {
        "truncated": f"model.path={root / 'truncated'}",
        "locked": f"model.path={root / 'locked'}",
    }


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Iterator[dict[str, Case]]:
    root = tmp_path_factory.mktemp("models")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = {name: Case(override) for name, override in write_models(root).items()}
        found["locked"] = found["locked"]._replace(prefix=without_privileges)
        yield found | {
            "memory": Case("cache.memory_gib=0.000001"),
            "port": Case(f"server.port={listener.getsockname()[1]}"),
            "files": Case("server.port=0", lambda: few_files(20)),
            "temporary": Case("server.port=0", no_temporary_files),
        }
    (root / "locked").chmod(0o700)


class End(NamedTuple):
    """How a start ended."""

    code: int
    text: str  # standard error
    skipped: str = ""  # why there was no start; empty if there was one


@pytest.fixture(scope="module")
def ends(cases: dict[str, Case]) -> Iterator[dict[str, End]]:
    """The ends of all starts. The starts run at the same time, because each imports for seconds."""
    running: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, End] = {}
    try:
        for name, case in cases.items():
            try:
                prefix = case.prefix()
            except pytest.skip.Exception as skip:
                found[name] = End(0, "", str(skip))
                continue
            running[name] = subprocess.Popen(
                [*prefix, sys.executable, "-m", "ostinato", "serve", *SMALL, case.override],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        for name, one in running.items():
            _, text = one.communicate(timeout=240)
            found[name] = End(one.returncode, text)
        yield found
    finally:
        for one in running.values():
            one.kill()
            one.communicate()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("truncated", ["model.safetensors is truncated"]),
        ("locked", ["model.path=", "locked' cannot be read: Permission denied for user id"]),
        ("memory", ["not enough memory", "cache.memory_gib"]),
        ("port", ["server.port=", "is in use", "choose another port"]),
        ("files", ["the limit of open files is 20", "ulimit -n"]),
        ("temporary", ["neither the cache directory nor one for temporary files", "TMPDIR"]),
    ],
)
def test_one_line(ends, name, words):
    code, text, skipped = ends[name]
    if skipped:
        pytest.skip(skipped)
    assert code == 1
    # The line may follow the progress bar of the weights.
    (line,) = [one for one in text.splitlines() if one.startswith("run: ")]
    assert [word for word in words if word not in line] == []
    assert "Traceback" not in text


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name. `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(prefix="o-") as directory:
        yield Path(directory)


def test_a_signal_while_it_starts(short_path):
    """A signal ends a server that is not ready. Two servers get one signal each."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    servers = {}
    for number in numbers:
        (scratch := short_path / number.name).mkdir()
        servers[number] = subprocess.Popen(
            [sys.executable, "-m", "ostinato", "serve", *SMALL],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
    engines = {}
    try:
        for number, server in servers.items():
            assert server.stdout is not None, "stdout=PIPE"
            assert "answers 503 until" in server.stdout.readline()
            engines[number] = engine_of(server.pid)
            engines[number].suspend()  # it cannot be ready before the signal
        for number, server in servers.items():
            engine = engines[number]
            server.send_signal(number)
            engine.resume()
            _, text = server.communicate(timeout=PATIENCE_S)
            assert server.returncode == 0
            # The engine may already have reported its first layers.
            assert [line for line in text.splitlines() if " INFO engine: " not in line] == []
            psutil.wait_procs([engine], timeout=PATIENCE_S)
            assert not engine.is_running()
            assert list((short_path / number.name).iterdir()) == []
    finally:
        for server in servers.values():
            server.kill()
            server.communicate()
