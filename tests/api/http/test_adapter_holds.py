"""A request keeps its adapter until its answer has been sent, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from litestar.exceptions import LitestarException

from ostinato.api.server.app import create_app
from ostinato.conf.sections.server_schema import ServerConfig
from tests.api.adapter_apps import adapter_apps, is_released, load, unload, wait_until_released
from tests.api.answers import error_of
from tests.api.fake_client import HELLO
from tests.api.server.test_generation_endpoints import asgi_post
from tests.waiting import wait_until


@pytest.fixture
def make(make_app):
    return adapter_apps(make_app)


@pytest.fixture
def app(make):
    return make()


class TestHolds:
    """`FakeClient.generate` and `pool` also check that the adapter is held when they begin."""

    def test_a_request_keeps_the_adapter_that_its_name_meant(self, make):
        app = make([HELLO[0], None, HELLO[2]])
        old = app.engine.adapters.add("sql")
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(app.chat(model="sql")))
        thread.start()
        wait_until(lambda: app.engine.used)
        assert load(app, load_inplace=True).status_code == 200
        new = app.engine.adapters.get("sql")
        assert unload(app).status_code == 200
        assert app.engine.adapters.held[old] == 1
        app.engine.released.set()
        thread.join()
        assert answers[0].json()["model"] == "sql"
        assert answers[0].json()["choices"][0]["message"]["content"] == "Hello"
        assert app.engine.used == [old]
        assert old != new
        wait_until_released(app)

    def test_between_the_acceptance_and_the_start(self, make, monkeypatch):
        """A request that waits for its grammar keeps its adapter."""
        app = make()
        adapter = app.engine.adapters.add("sql")

        async def compile_grammar(constraint: object) -> str:
            assert app.engine.adapters.held[adapter] == 1
            await app.engine.unload_adapter("sql")
            return "a grammar"

        monkeypatch.setattr(app.engine, "compile_grammar", compile_grammar)
        answer = app.complete(model="sql", structured_outputs={"regex": "a"})
        assert answer.status_code == 200
        assert app.engine.used == [adapter]
        wait_until_released(app)

    @pytest.mark.parametrize("is_replaced", [False, True])
    def test_during_the_preparation_in_another_process(self, make, monkeypatch, is_replaced):
        """The name means what it means when the prepared request comes back."""
        app = make()
        app.engine.adapters.add("sql")
        run_apart = app.service.preparer.run_apart

        async def change_meanwhile(*arguments: Any) -> Any:
            prepared = await run_apart(*arguments)
            app.engine.adapters.remove("sql")
            if is_replaced:
                app.engine.adapters.add("sql")
            return prepared

        monkeypatch.setattr(app.service.preparer, "run_apart", change_meanwhile)
        answer = app.complete(model="sql", user="u" * 6000)
        if is_replaced:
            assert answer.status_code == 200
            assert app.engine.used == [app.engine.adapters.get("sql")]
        else:
            assert error_of(answer)["code"] == "model_not_found"
            assert app.engine.used == []
        wait_until_released(app)

    @pytest.mark.parametrize("fields", [{"max_tokens": 10**6}, {"temperature": -1}])
    def test_refused_requests_hold_nothing(self, app, fields):
        app.engine.adapters.add("sql")
        assert app.complete(model="sql", **fields).status_code == 400
        wait_until_released(app)

    def test_a_request_that_the_queue_refuses(self, make):
        app = make(server=ServerConfig(max_prompt_tokens=1))
        app.engine.adapters.add("sql")
        assert error_of(app.complete(model="sql", prompt=[1, 2]))["code"] == "prompt_too_long"
        wait_until_released(app)

    @pytest.mark.parametrize("streams", [False, True])
    def test_a_client_that_disconnects(self, make, streams):
        app = make([HELLO[0], None])
        app.engine.adapters.add("sql")
        body = {"prompt": "Hi", "model": "sql", "stream": streams}

        async def scenario() -> None:
            disconnect = asyncio.Event()
            post = asyncio.create_task(
                asgi_post(create_app(app.service), "/v1/completions", body, disconnect=disconnect)
            )
            while not app.engine.used:
                await asyncio.sleep(0)
            assert not is_released(app)
            disconnect.set()
            await asyncio.wait_for(post, 240)

        asyncio.run(scenario())
        assert len(app.engine.aborted) == 1
        wait_until_released(app)

    def test_a_client_that_is_gone_before_the_stream_begins(self, make):
        app = make()
        app.engine.adapters.add("sql")
        body = json.dumps({"prompt": "Hi", "model": "sql", "stream": True}).encode()

        async def scenario() -> None:
            async def receive() -> Any:
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message: Any) -> None:
                raise OSError("the connection is closed")

            scope: Any = {
                "type": "http",
                "method": "POST",
                "path": "/v1/completions",
                "raw_path": b"/v1/completions",
                "root_path": "",
                "query_string": b"",
                "headers": [(b"content-type", b"application/json")],
                "http_version": "1.1",
                "scheme": "http",
                "server": ("test", 80),
                "client": ("test", 1),
                "extensions": {},
                "asgi": {"version": "3.0"},
            }
            with pytest.raises(LitestarException):
                await create_app(app.service)(scope, receive, send)

        asyncio.run(scenario())
        assert app.engine.adapters.held.total() == 0
        assert app.engine.adapters.held, "the request was not accepted"

    def test_a_reply_in_the_background_holds_its_adapter_until_it_ends(self, make):
        app = make([HELLO[0], None, HELLO[2]])
        adapter = app.engine.adapters.add("sql")
        fields = {"input": "Hi", "model": "sql", "background": True}
        answer = app.http.post("/v1/responses", json=fields).json()
        assert (answer["status"], answer["model"]) == ("queued", "sql")
        assert unload(app).status_code == 200
        assert app.engine.adapters.held[adapter] == 1
        app.engine.released.set()
        url = f"/v1/responses/{answer['id']}"
        going_on = ("queued", "in_progress")
        wait_until(lambda: app.http.get(url).json()["status"] not in going_on)
        now = app.http.get(url).json()
        assert (now["status"], now["model"]) == ("completed", "sql")
        wait_until_released(app)
