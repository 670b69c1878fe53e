"""HTTPS and API keys of a real server: which requests it answers, and that it shows no key."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import psutil
import pytest

from tests.api.otlp_receiver import otlp_receiver
from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import PATIENCE_S, wait_until

KEYS = ("sk-first-Zq83kd", "sk-second-Pw7720x")
LISTED = "sk-listed-Rr41aa"  # given on the command line, which every user of the system can read


class Site(NamedTuple):
    server: ServerProcess
    authority: Path  # file with the certificate of the authority that signed the server's
    traces: list[bytes]
    dumps: Path  # directory of the flight recorder's files

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority)

    def client(self, key: str | None = KEYS[0]) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(
            base_url=self.server.url, verify=self.trust, headers=headers, timeout=PATIENCE_S
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    trustme = pytest.importorskip("trustme", reason="trustme makes the certificates")
    directory = tmp_path_factory.mktemp("access")
    issuer = trustme.CA()
    certificate = issuer.issue_cert("127.0.0.1")
    paths = {name: directory / name for name in ("ca.pem", "chain.pem", "key.pem", "keys", "dumps")}
    issuer.cert_pem.write_to_path(paths["ca.pem"])
    certificate.private_key_pem.write_to_path(paths["key.pem"])
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(paths["chain.pem"], append=True)
    paths["keys"].write_text("# one a line\n" + "\n".join(KEYS) + "\n")
    with (
        otlp_receiver() as (endpoint, traces),
        ServerProcess(
            f"server.tls_certificate={paths['chain.pem']}",
            f"server.tls_key={paths['key.pem']}",
            f"server.api_key_file={paths['keys']}",
            f"server.api_keys=[{LISTED}]",
            f"server.otlp_endpoint={endpoint}",
            f"server.flight_recorder_dir={paths['dumps']}",
            "server.log_level=debug",
            "server.log_prompts=true",
        ) as server,
    ):
        yield Site(server, paths["ca.pem"], traces, paths["dumps"])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_accepts_the_certificate_only_with_its_authority(site: Site) -> None:
    def curl(*options: str) -> subprocess.CompletedProcess[str]:
        body = json.dumps({"prompt": "Once", "max_tokens": 3, "ignore_eos": True})
        command = ["curl", "--silent", "--show-error", "--max-time", "60", *options]
        command += ["-H", f"x-api-key: {KEYS[1]}", "-H", "Content-Type: application/json"]
        command += ["-d", body, f"{site.server.url}/v1/completions"]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    reply = json.loads(curl("--cacert", str(site.authority)).stdout)
    assert reply["usage"]["completion_tokens"] == 3
    stranger = curl()
    assert stranger.returncode != 0
    assert "certificate" in stranger.stderr


def test_the_official_client_over_https(site: Site) -> None:
    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{site.server.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=site.trust, timeout=PATIENCE_S),
        )

    with client(KEYS[0]) as known:
        name = known.models.list().data[0].id
        stream = known.completions.create(model=name, prompt="Once", max_tokens=5, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
        assert len(known.models.list()._request_id or "") == 32
        named = known.completions.create(
            model=name, prompt="Once", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
        )
        assert (named._request_id, named.id) == ("mine", "cmpl-mine")
    with client("sk-other") as unknown, pytest.raises(openai.AuthenticationError) as refused:
        unknown.models.list()
    assert len(refused.value.request_id or "") == 32


def test_plain_http_gets_no_answer(site: Site) -> None:
    with pytest.raises(httpx.HTTPError):
        HTTP.get(site.server.url.replace("https", "http") + "/live")


def test_no_key_is_seen_anywhere(site: Site) -> None:
    """No key occurs in answers, traces, dumps or the log at level debug.

    The list of processes shows only the key that was given on the command line.
    """
    seen: list[str] = []
    server = site.server
    with site.client() as client, site.client(LISTED) as listed, site.client(None) as keyless:
        for one in (client, listed):
            body = {"prompt": "Once upon", "max_tokens": 4, "request_id": f"{id(one)}"}
            reply = one.post("/v1/completions", json=body, headers={"x-trace": "1"})
            assert reply.status_code == 200
            seen.append(reply.text)
            server.wait_for_line(f"cmpl-{id(one)} done")
        # A refusal does not repeat the key either: a refused request may have a valid key.
        for wrong in (
            client.post("/v1/completions", json={"prompt": 1}),
            client.get("/no/such/path"),
            client.get("/v1/models", headers={"x-api-key": KEYS[1], "x-trace": "no"}),
            keyless.get("/v1/models"),
            keyless.get("/v1/models", headers={"Authorization": f"Basic {KEYS[0]}"}),
            keyless.get("/v1/models", headers={"Authorization": f"Bearer {KEYS[0]}x"}),
        ):
            seen += [wrong.text, str(wrong.headers)]
        page = keyless.get("/")
        assert page.status_code == 200
        seen.append(page.text)
        paths = ("/metrics", "/schema/openapi.json", "/debug/state", "/debug/flight", "/load")
        for path in (*paths, "/version", "/v1/models", "/tokenizer_info", "/ready", "/health"):
            reply = client.get(path)
            assert reply.status_code == 200, path
            seen += [reply.text, str(reply.headers)]
        for process in (psutil.Process(server.pid), server.engine):
            # The system shows the command line. The docs say so, and recommend a file.
            seen += [" ".join(process.cmdline()).replace(LISTED, ""), str(process.environ())]
        server.engine.kill()
        server.wait_for_line("flight recorder: the last")
    dumped = [path.read_text() for path in site.dumps.iterdir()]
    assert dumped
    wait_until(lambda: site.traces, "no trace came")
    assert any("prompt_token_ids" in line for line in server.output)  # level debug is on
    everything = "\n".join((*seen, *dumped, *server.output))
    for key in (*KEYS, LISTED):
        assert key not in everything
        assert all(key.encode() not in body for body in site.traces)


@pytest.mark.parametrize(("path", "method"), [("/health", "GET"), ("/v1/chat/completions", "POST")])
def test_options_need_no_key(site: Site, path: str, method: str) -> None:
    with site.client(key=None) as client:
        reply = client.options(path)
    assert reply.status_code == 204
    assert method in reply.headers["allow"]
    assert reply.content == b""
