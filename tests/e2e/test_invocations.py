"""`POST /invocations` and `/ping`, the two routes that SageMaker calls."""

from __future__ import annotations

import pytest

from tests.e2e.json_requests import CHAT, HI, MODEL, post, refused
from tests.e2e.server_process import HTTP


class TestInvocations:
    @pytest.mark.parametrize(
        ("path", "body", "kind"),
        [
            (CHAT, {"messages": HI, "max_tokens": 5}, "chat.completion"),
            ("/v1/completions", {"prompt": "Once", "max_tokens": 5}, "text_completion"),
            ("/v1/embeddings", {"input": "Once"}, "list"),
        ],
    )
    def test_the_body_says_what_is_asked(self, server, path, body, kind):
        body = {**body, "request_id": "same"}
        if path != "/v1/embeddings":
            body["temperature"] = 0
        one, other = (post(server, place, **body) for place in ("/invocations", path))
        assert one.pop("object") == other.pop("object") == kind
        for reply in (one, other):
            reply.pop("created")
            reply.pop("usage")
        assert one == other

    def test_rankings_and_scores(self, server):
        pair = {"text_1": "a", "text_2": "b"}
        assert len(post(server, "/invocations", **pair)["data"]) == 1
        assert post(server, "/invocations", query="a", documents=["b", "c"])["results"]

    def test_a_stream(self, server):
        body = {"prompt": "Once", "max_tokens": 3, "stream": True}
        text = HTTP.post(f"{server.url}/invocations", json=body).text
        assert text.endswith("data: [DONE]\n\n")

    def test_refusals(self, server):
        error = refused(server, "/invocations", model=MODEL)
        assert error["code"] == "missing_field"
        assert "messages, prompt, input" in error["message"]
        assert refused(server, "/invocations", messages=HI, temperature=9)["param"] == "temperature"
        for body, code in ((b"{", "invalid_json"), (b"[]", "invalid_value")):
            reply = HTTP.post(
                f"{server.url}/invocations",
                content=body,
                headers={"Content-Type": "application/json"},
            )
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)

    def test_ping(self, server):
        for method in ("GET", "POST"):
            assert HTTP.request(method, f"{server.url}/ping").json()["status"] == "ok"
