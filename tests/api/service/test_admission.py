"""API keys, limits of the queue and of prompts, deadlines, and CORS."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ostinato.api.http.api_keys import KeyRing, with_keys
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.errors import DeadlineError, StartupError
from ostinato.runtime.types.engine_info import EngineStats
from ostinato.runtime.types.outputs import FinishReason
from tests.api.fake_client import HELLO, FakeClient, scripted
from tests.waiting import wait_until

KEYS = ["first-key", "second-key"]


def error_of(response) -> dict:
    return response.json()["error"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class TestKeys:
    def test_a_key_opens_every_endpoint_in_both_forms(self, make_app):
        app = make_app(server=ServerConfig(api_keys=KEYS))
        for key in KEYS:
            assert app.http.get("/v1/models", headers=bearer(key)).status_code == 200
            assert app.http.get("/v1/models", headers={"x-api-key": key}).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [{}, bearer("wrong"), bearer(""), {"Authorization": "Basic first-key"}, {"x-api-key": "f"}],
    )
    @pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version"])
    def test_requests_without_a_valid_key_are_refused(self, make_app, path, headers):
        app = make_app(server=ServerConfig(api_keys=KEYS))
        response = app.http.get(path, headers=headers)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert not any(key in response.text for key in KEYS)

    def test_the_other_dialect_has_its_own_error_object(self, make_app):
        app = make_app(server=ServerConfig(api_keys=KEYS))
        response = app.http.post("/v1/messages", json={})
        assert response.status_code == 401
        assert error_of(response)["type"] == "authentication_error"

    def test_probes_need_none(self, make_app):
        app = make_app(server=ServerConfig(api_keys=KEYS))
        for path in ("/live", "/ready", "/health"):
            assert app.http.get(path).status_code == 200

    def test_a_file_adds_to_the_list(self, make_app, tmp_path):
        path = tmp_path / "keys"
        path.write_text("# those who may\n\n  third-key  \nfourth-key\n")
        server = with_keys(ServerConfig(api_keys=KEYS, api_key_file=str(path)))
        assert server.api_keys == [*KEYS, "third-key", "fourth-key"]
        app = make_app(server=server)
        assert app.http.get("/v1/models", headers=bearer("third-key")).status_code == 200

    @pytest.mark.parametrize(
        ("text", "said"), [("# none\n", "has no key"), ("ok\ntwo words\n", "line 2 is not a key")]
    )
    def test_a_bad_file_is_named_without_its_contents(self, tmp_path, text, said):
        path = tmp_path / "keys"
        path.write_text(text)
        with pytest.raises(StartupError, match=said) as caught:
            with_keys(ServerConfig(api_key_file=str(path)))
        assert str(path) in str(caught.value)
        assert "two words" not in str(caught.value)
        with pytest.raises(StartupError, match="cannot be read"):
            with_keys(ServerConfig(api_key_file=str(tmp_path / "missing")))

    def test_a_ring_finds_places_and_keeps_no_text(self):
        ring = KeyRing(KEYS)
        assert [ring.find(key) for key in (*KEYS, "", "first-ke", "first-keyy")] == [
            0,
            1,
            None,
            None,
            None,
        ]
        assert not any(key in repr(vars(ring)) for key in KEYS)

    def test_each_key_has_so_many_requests_at_once(self, make_app):
        server = ServerConfig(api_keys=KEYS, max_requests_per_key=1)
        app = make_app([None, *HELLO], server=server)  # a reply waits until `released` is set

        def ask(key: str):
            body = {"prompt": "Hi"}
            return app.http.post("/v1/completions", json=body, headers=bearer(key))

        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(ask, KEYS[0])
            wait_until(lambda: bool(app.engine.requests))
            refused = ask(KEYS[0])
            assert refused.status_code == 429
            assert error_of(refused)["code"] == "too_many_requests"
            assert error_of(refused)["type"] == "rate_limit_error"
            assert refused.headers["retry-after"] == "1"
            assert app.http.get("/v1/models", headers=bearer(KEYS[1])).status_code == 200
            app.engine.released.set()
            assert running.result(240).status_code == 200
        assert app.http.get("/v1/models", headers=bearer(KEYS[0])).status_code == 200

    def test_a_reply_in_the_background_counts_until_it_ends(self, make_app):
        server = ServerConfig(api_keys=KEYS, max_requests_per_key=1)
        app = make_app([None, *HELLO], server=server)  # a reply waits until `released` is set

        def ask(**fields: object):
            body = {"input": "Hi", **fields}
            return app.http.post("/v1/responses", json=body, headers=bearer(KEYS[0]))

        first = ask(background=True)
        assert first.status_code == 200
        path = f"/v1/responses/{first.json()['id']}"
        for fields in ({}, {"background": True}):
            assert error_of(ask(**fields))["code"] == "too_many_requests"
        assert app.http.get(path, headers=bearer(KEYS[0])).json()["status"] == "queued"
        app.engine.released.set()

        def status() -> str:
            return app.http.get(path, headers=bearer(KEYS[0])).json()["status"]

        wait_until(lambda: status() == "completed")
        app.engine.released.clear()
        second = ask(background=True)
        assert second.status_code == 200
        ended = f"/v1/responses/{second.json()['id']}/cancel"
        assert app.http.post(ended, headers=bearer(KEYS[0])).json()["status"] == "cancelled"
        app.engine.released.set()
        assert ask().status_code == 200


class TestQueue:
    def test_too_many_that_wait(self, make_app):
        app = make_app(server=ServerConfig(max_queued_requests=3))
        app.engine.stats = EngineStats(predicted_ttft_seconds=6.2)
        app.engine.num_queued = 2
        assert app.chat().status_code == 200
        app.engine.num_queued = 3
        for response in (app.chat(), app.complete()):
            assert response.status_code == 429
            assert error_of(response)["code"] == "queue_full"
            assert "server.max_queued_requests=3" in error_of(response)["message"]
            assert response.headers["retry-after"] == "7"  # the predicted time, rounded up
        assert app.http.get("/ready").json()["status"] == "queue_full"

    def test_too_many_tokens_that_wait(self, make_app):
        app = make_app(server=ServerConfig(max_queued_tokens=10))
        app.engine.num_queued_tokens = 8
        body = {"prompt": [1, 2, 3], "max_tokens": 2}
        response = app.http.post("/v1/completions", json=body)
        assert response.status_code == 429
        assert "tokens that wait: 8, of this request: 3," in error_of(response)["message"]
        assert app.http.post("/v1/completions", json=body | {"prompt": [1, 2]}).status_code == 200
        app.engine.num_queued_tokens = 0  # an empty queue takes a prompt of any length
        body["prompt"] = list(range(1, 21))
        assert app.http.post("/v1/completions", json=body).status_code == 200

    def test_tokens_that_wait_are_counted_only_for_a_limit(self, make_app, monkeypatch):
        counts = []

        class Counting(FakeClient):
            @property
            def num_queued_tokens(self) -> int:
                counts.append(1)
                return 0

            @num_queued_tokens.setter
            def num_queued_tokens(self, value: int) -> None:
                pass

        monkeypatch.setattr("tests.api.conftest.FakeClient", Counting)
        assert make_app().complete().status_code == 200
        assert counts == []
        limited = make_app(server=ServerConfig(max_queued_tokens=10))
        assert limited.complete().status_code == 200
        assert counts

    def test_a_stream_is_refused_before_it_begins(self, make_app):
        app = make_app(server=ServerConfig(max_queued_requests=1))
        app.engine.num_queued = 1
        assert app.chat(stream=True).status_code == 429

    def test_a_long_prompt(self, make_app):
        app = make_app(server=ServerConfig(max_prompt_tokens=3))
        body = {"prompt": [1, 2, 3], "max_tokens": 2}
        assert app.http.post("/v1/completions", json=body).status_code == 200
        response = app.http.post("/v1/completions", json=body | {"prompt": [1, 2, 3, 4]})
        assert response.status_code == 400
        assert error_of(response)["code"] == "prompt_too_long"
        assert "server.max_prompt_tokens" in error_of(response)["message"]


class TestDeadline:
    def test_the_sooner_of_field_and_header_counts_from_the_arrival(self, app):
        for fields, header, seconds in (
            ({"deadline_ms": 5000}, {}, 5.0),
            ({}, {"X-Request-Timeout-Ms": "7000"}, 7.0),
            ({"deadline_ms": 9000}, {"X-Request-Timeout-Ms": "8000"}, 8.0),
        ):
            before = time.monotonic()
            body = {"prompt": "Hi", **fields}
            assert app.http.post("/v1/completions", json=body, headers=header).status_code == 200
            after = time.monotonic()
            assert before + seconds <= app.engine.deadlines[-1] <= after + seconds
        app.complete()
        assert app.engine.deadlines[-1] is None

    @pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan", "inf", "1e12"])
    def test_a_bad_header(self, app, value):
        response = app.http.post(
            "/v1/completions", json={"prompt": "Hi"}, headers={"X-Request-Timeout-Ms": value}
        )
        assert response.status_code == 400
        assert error_of(response)["param"] == "x-request-timeout-ms"

    def test_a_day_is_the_longest(self, app):
        day_ms = 24 * 3600 * 1000
        for value, status in ((1, 200), (day_ms, 200), (day_ms + 1, 400)):
            assert app.complete(deadline_ms=value).status_code == status
            header = {"X-Request-Timeout-Ms": str(value)}
            reply = app.http.post("/v1/completions", json={"prompt": "Hi"}, headers=header)
            assert reply.status_code == status

    @pytest.mark.parametrize("value", [0, -1, "5", 1e12])
    def test_a_bad_field(self, app, value):
        response = app.complete(deadline_ms=value)
        assert response.status_code == 400
        assert error_of(response)["param"] == "deadline_ms"

    def test_without_a_token_it_is_a_504_that_is_not_to_be_repeated(self, make_app):
        app = make_app([DeadlineError("over")])
        response = app.complete(deadline_ms=5)
        assert response.status_code == 504
        assert error_of(response)["type"] == "server_error"
        assert error_of(response)["code"] == "deadline_exceeded"
        assert response.headers["x-should-retry"] == "false"

    def test_prompts_without_a_token_end_beside_others(self, make_app):
        app = make_app([scripted("Hello", [5], finish_reason=FinishReason.stop)])
        ends = app.engine.generate

        async def generate(request_id: str, prompt_token_ids: list[int], *rest: Any, **more: Any):
            if prompt_token_ids != [1]:
                raise DeadlineError("over")
            async for output in ends(request_id, prompt_token_ids, *rest, **more):
                yield output

        app.engine.generate = generate
        body = {"prompt": [[2], [1], [3]], "n": 2, "deadline_ms": 5}
        reply = app.http.post("/v1/completions", json=body).json()
        late = ("", "length", "deadline_exceeded")
        assert [
            (one["text"], one["finish_reason"], one["stop_reason"]) for one in reply["choices"]
        ] == [late] * 2 + [("Hello", "stop", None)] * 2 + [late] * 2
        assert reply["usage"]["completion_tokens"] == 2
        stream = app.http.post("/v1/completions", json=body | {"stream": True}).text
        chunks = [
            json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")
        ]
        ends_of = [one for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
        assert sorted(one["index"] for one in ends_of) == [0, 1, 2, 3, 4, 5]
        body["prompt"] = [[2], [3]]
        assert app.http.post("/v1/completions", json=body).status_code == 504


class TestCors:
    def test_origins_that_may_call(self, make_app):
        app = make_app(server=ServerConfig(cors_origins=["https://a.example"], api_keys=KEYS))
        preflight = {"Access-Control-Request-Method": "POST"}
        allowed = app.http.options(
            "/v1/chat/completions", headers={"Origin": "https://a.example", **preflight}
        )
        assert allowed.status_code in (200, 204)  # a preflight has no key
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        answer = app.http.get(
            "/v1/models", headers={"Origin": "https://a.example", **bearer(KEYS[0])}
        )
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = app.http.get("/v1/models", headers={"Origin": "https://b.example", **bearer("x")})
        assert "access-control-allow-origin" not in other.headers

    def test_off_by_default(self, app):
        answer = app.http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"api_keys": ["good", "two words"]},
            r"server\.api_keys must be texts of ASCII characters",
        ),
        ({"api_keys": [""]}, r"server\.api_keys must be"),
        ({"tls_certificate": "cert.pem"}, r"server\.tls_key must be set exactly when"),
        ({"max_requests_per_key": 2}, r"server\.max_requests_per_key must be null without"),
        ({"cors_origins": ["example.org"]}, r"server\.cors_origins must be \* or origins"),
        ({"max_queued_requests": 0}, r"server\.max_queued_requests must be null or at least 1"),
        ({"max_queued_tokens": 0}, r"server\.max_queued_tokens must be null or at least 1"),
        ({"max_prompt_tokens": 0}, r"server\.max_prompt_tokens must be null or at least 1"),
        ({"hang_timeout_s": 0.0}, r"server\.hang_timeout_s must be null or above 0"),
        ({"max_restarts": -1}, r"server\.max_restarts must be in \[0, 1000\]"),
    ],
)
def test_bad_values_are_refused_by_name(fields, said):
    with pytest.raises(ValueError, match=said) as caught:
        ServerConfig(**fields)
    assert "two words" not in str(caught.value)
