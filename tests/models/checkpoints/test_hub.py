"""Models of a hub: the choice of a GGUF model, and downloads from a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from ostinato.models.checkpoints.hub import HubError, HubName, choose_gguf
from tests.models.gguf_files import save_checkpoint, write_gguf

FILES = [
    "README.md",
    "Model-7B.Q4_K_M.gguf",
    "Model-7B.Q4_K_S.gguf",
    "model-7b-iq4_xs.gguf",
    "mmproj-Q8_0.gguf",
    "Q8_0/model-00001-of-00002.gguf",
    "Q8_0/model-00002-of-00002.gguf",
    "big-BF16-00001-of-00002.gguf",
    "big-BF16-00002-of-00002.gguf",
]
SPLIT = ["Q8_0/model-00001-of-00002.gguf", "Q8_0/model-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ("Q4_K_M", ["Model-7B.Q4_K_M.gguf"]),
        ("q4_k_s", ["Model-7B.Q4_K_S.gguf"]),
        ("IQ4_XS", ["model-7b-iq4_xs.gguf"]),
        ("Q8_0", SPLIT),
        ("bf16", ["big-BF16-00001-of-00002.gguf", "big-BF16-00002-of-00002.gguf"]),
        ("Model-7B.Q4_K_M.gguf", ["Model-7B.Q4_K_M.gguf"]),
        ("Q8_0/model-00002-of-00002.gguf", SPLIT),
    ],
)
def test_a_type_or_a_file_names_a_model(wanted: str, files: list[str]) -> None:
    name = HubName.parse(f"someone/some-model:{wanted}")
    assert name == ("someone/some-model", wanted)
    assert name is not None
    assert choose_gguf(FILES, name) == files


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("Q6_K", r"has no GGUF model Q6_K; it has Model-7B\.Q4_K_M\.gguf, .*Name one: a/b:FILE"),
        ("", "has 5 GGUF models; it has"),
    ],
)
def test_a_choice_that_is_not_clear_is_refused(wanted: str, message: str) -> None:
    with pytest.raises(HubError, match=message):
        choose_gguf(FILES, HubName("a/b", wanted))


def test_a_repository_without_gguf() -> None:
    with pytest.raises(HubError, match=r"^the repository has no GGUF model Q4_0$"):
        choose_gguf(["config.json"], HubName("a/b", "Q4_0"))


class _Hub(BaseHTTPRequestHandler):
    """Answers what a download asks a hub for: a repository, its list of files, and a file."""

    root: ClassVar[Path]
    commit: ClassVar[str] = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        files = sorted(str(f.relative_to(self.root)) for f in self.root.rglob("*") if f.is_file())
        headers: dict[str, str] = {}
        if path.startswith("/api/models/someone/gguf/tree/"):
            body = json.dumps(
                [
                    {"type": "file", "path": f, "size": (self.root / f).stat().st_size, "oid": f}
                    for f in files
                ]
            ).encode()
        elif path.startswith("/api/models/someone/gguf"):
            siblings = [{"rfilename": file} for file in files]
            about = {"id": "someone/gguf", "sha": self.commit, "siblings": siblings}
            body = json.dumps(about).encode()
        elif path.startswith(f"/someone/gguf/resolve/{self.commit}/"):
            file = path.removeprefix(f"/someone/gguf/resolve/{self.commit}/")
            body = (self.root / file).read_bytes()
            headers = {"ETag": f'"{file}"', "X-Repo-Commit": self.commit}
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    _Hub.root = tmp_path / "hub"
    _Hub.root.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


RESOLVE = """
import sys
from ostinato.models.checkpoints.checkpoint import CheckpointError, resolve_path
try:
    print(resolve_path(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""
FIND_ADAPTER = """
import sys
from ostinato.runtime.client.adapter_loading import find_adapter
try:
    print(find_adapter(sys.argv[1]))
except ValueError as error:
    print(error)
assert "torch" not in sys.modules
"""


def resolve(
    path: str, endpoint: str, home: Path, *, is_offline: bool = False, code: str = RESOLVE
) -> str:
    """What `resolve_path` gives in a new process: the path, or the text of its error.

    The package `huggingface_hub` reads HF_ENDPOINT when it is imported. So each call needs its own
    process.
    """
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    # If the hub does not answer in time, the package uses its local copy instead. The limits are
    # long, because a busy machine answers late.
    environment |= {"HF_HUB_ETAG_TIMEOUT": "240", "HF_HUB_DOWNLOAD_TIMEOUT": "240"}
    environment["HF_HUB_OFFLINE"] = "1" if is_offline else "0"
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_gguf_model_is_downloaded_from_a_hub(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint("llama-mqa", tmp_path / "model")
    write_gguf(checkpoint, tmp_path / "hub/model-Q8_0.gguf")
    home = tmp_path / "home"
    file = Path(resolve("someone/gguf", hub, home))  # the only model
    assert file.name == "model-Q8_0.gguf"
    assert file.read_bytes() == (tmp_path / "hub/model-Q8_0.gguf").read_bytes()
    for number in (1, 2):
        (tmp_path / f"hub/model-F16-0000{number}-of-00002.gguf").write_bytes(b"x")
    monkeypatch.setattr(_Hub, "commit", "f" * 40)
    first = Path(resolve("someone/gguf:F16", hub, home))
    assert first.name == "model-F16-00001-of-00002.gguf"
    assert sorted(each.name for each in first.parent.iterdir()) == [
        "model-F16-00001-of-00002.gguf",
        "model-F16-00002-of-00002.gguf",
    ]
    refused = resolve("someone/gguf:Q4_0", hub, home)
    assert refused.startswith("model.path='someone/gguf:Q4_0': the repository has no GGUF model")
    # Without a connection the files that were downloaded before are used.
    assert Path(resolve("someone/gguf:F16", hub, home, is_offline=True)) == first
    absent = resolve("someone/other:F16", hub, home, is_offline=True)
    assert absent.startswith("model.path='someone/other:F16': the hub did not answer: ")


@pytest.mark.slow
def test_an_adapter_is_downloaded_from_a_hub(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, files = tmp_path / "home", tmp_path / "hub"
    (files / "README.md").write_text("not needed")
    (files / "adapter_config.json").write_text("{}")
    refused = resolve("someone/gguf", hub, home, code=FIND_ADAPTER)
    assert refused.endswith("has no adapter_model.safetensors or adapter_model.bin")
    for number, weights in enumerate(("adapter_model.bin", "adapter_model.safetensors")):
        (files / weights).write_bytes(b"x")
        monkeypatch.setattr(_Hub, "commit", f"{number}" * 40)
        found = Path(resolve("someone/gguf", hub, home, code=FIND_ADAPTER))
        assert sorted(each.name for each in found.iterdir()) == ["adapter_config.json", weights]
    assert resolve("someone/gguf", hub, home, is_offline=True, code=FIND_ADAPTER) == str(found)
    absent = resolve("someone/other", hub, home, is_offline=True, code=FIND_ADAPTER)
    assert absent.startswith("no such directory, and the hub did not give it: ")
