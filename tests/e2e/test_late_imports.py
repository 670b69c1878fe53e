"""A ready server has imported what its requests need. An import would hold up all other requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server_process import HTTP, ServerProcess

# Python runs a module of this name when it starts. This one writes the name of each module that the
# API process imports. Its children have no `serve` in their command lines.
SITE = """
import os, sys
from pathlib import Path

if "serve" in Path("/proc/self/cmdline").read_text().split("\\0"):
    api, log = os.getpid(), os.open(os.environ["IMPORT_LOG"], os.O_WRONLY | os.O_APPEND)

    def note(event, arguments):
        if event == "import" and os.getpid() == api:
            os.write(log, f"{arguments[0]}\\n".encode())

    sys.addaudithook(note)
"""
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
CALLS = [
    ("GET", "/metrics", None),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
    ("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 4, "logprobs": 5}),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 4, "stream": True}),
    ("POST", "/v1/completions", {"prompt": "Once", "max_tokens": -1}),
    ("GET", "/debug/state", None),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "imports"
    path.touch()
    return path


@pytest.fixture
def server(tmp_path: Path, log: Path) -> Iterator[ServerProcess]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with ServerProcess(environment={"PYTHONPATH": path, "IMPORT_LOG": str(log)}) as process:
        yield process


def test_requests_import_nothing(server: ServerProcess, log: Path) -> None:
    HTTP.get(f"{server.url}/health")
    before = log.read_text().splitlines()
    assert "litestar" in before
    for method, path, body in CALLS:
        assert HTTP.request(method, server.url + path, json=body).status_code in (200, 400)
        late = log.read_text().splitlines()[len(before) :]
        assert not late, f"{path} imported {late}"
