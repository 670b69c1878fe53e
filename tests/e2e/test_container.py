"""A server in a container: a read-only cache, no home, a user without a name, few open files.

One server has all these limits at once. test_bad_start.py tests servers that cannot start.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ostinato.runtime.file_limit import RESERVED_FILES
from tests.confinement import few_files, read_only, unknown_user
from tests.e2e.server_process import ServerProcess
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
CONNECTIONS = 40


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory for the server's temporary files."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def server(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cache = tmp_path_factory.mktemp("cache")
    prefix = [
        *read_only(cache),
        *few_files(RESERVED_FILES + CONNECTIONS),
        *unknown_user(),
    ]
    environment = {
        "OSTINATO_CACHE_DIR": None,
        "XDG_CACHE_HOME": str(cache),
        "HOME": None,
        "TMPDIR": str(scratch),
    }
    with ServerProcess(prefix=prefix, environment=environment) as server:
        yield server


def connect(server: ServerProcess) -> socket.socket:
    address = urlsplit(server.url)
    assert address.hostname is not None
    assert address.port is not None
    return socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)


def answer_without_request(connection: socket.socket) -> bytes:
    """The bytes that the server sends before it closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def test_it_serves_from_a_temporary_cache_and_one_line_says_so(server, scratch):
    (line,) = [line for line in server.output if "the cache directory" in line]
    assert "WARNING" in line
    assert "(Read-only file system)" in line
    assert "the next start compiles again what no bundle has" in line
    assert "set OSTINATO_CACHE_DIR to a directory that can be written" in line
    (cache,) = scratch.glob("ostinato-run-cache-*")
    assert str(cache) in line
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once", "max_tokens": 4})
    assert answer.status_code == 200


def test_connections_leave_files_for_a_new_engine(server):
    """All connections are in use. The engine is killed, and a stream on one of them still ends."""
    body = json.dumps({"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    held = [connect(server) for _ in range(CONNECTIONS)]
    try:
        held[0].sendall((head + body).encode())
        first = held[0].recv(65536)
        assert first.startswith(b"HTTP/1.1 200"), first
        with connect(server) as refused:
            said = answer_without_request(refused)
        assert said.startswith(b"HTTP/1.1 503 ")
        error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "too_many_connections"
        assert f"has {CONNECTIONS} open connections" in error["message"]

        server.engine.kill()
        held[0].settimeout(PATIENCE_S)
        text = first
        while b"[DONE]" not in text:
            part = held[0].recv(65536)
            assert part, text
            text += part
        assert b'"error"' not in text
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: try_health(server) == 200)  # the server notices closed connections late


def try_health(server: ServerProcess) -> int:
    return httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code


def health_check(server: ServerProcess) -> int:
    """The exit code of the image's health check with this server's port."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    (line,) = [one for one in text.splitlines() if one.startswith("HEALTHCHECK")]
    name, *arguments = json.loads(line.partition("CMD ")[2])
    assert name == "python"
    port = str(urlsplit(server.url).port)
    command = [sys.executable, *(one.replace("8000", port) for one in arguments)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=PATIENCE_S).returncode


def test_it_ends_and_leaves_nothing(server, scratch):
    assert health_check(server) == 0
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert health_check(server) != 0
    assert list(scratch.iterdir()) == []
