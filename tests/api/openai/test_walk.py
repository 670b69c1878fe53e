"""How many calls and modules of the API lie between a route and the engine's client.

tests/runtime/client/test_client.py counts the modules between the client and the socket.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.runtime.client.requests import check_sampling, fit_prompt, make_requests
from ostinato.runtime.types.outputs import RequestOutput
from ostinato.runtime.types.params import SamplingParams
from tests.api.fake_client import FakeClient

API = (Path(__file__).parents[3] / "api").as_posix()
MAX_CALLS = 4
MAX_MODULES = 3  # such as the server-sent events, the reply and the runner of requests


class WatchingClient(FakeClient):
    """Records the API functions on the stack when the engine gets a request."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.walk: list[str] = []
        self.modules: set[str] = set()

    def generate(self, *args: Any, **fields: Any) -> AsyncIterator[RequestOutput]:
        frame = sys._getframe(1)
        while frame is not None:
            file = Path(frame.f_code.co_filename).resolve().as_posix()
            if file.startswith(API):
                self.walk.insert(0, frame.f_code.co_name)
                self.modules.add(file)
            frame = frame.f_back
        return super().generate(*args, **fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_a_reply_asks_the_engine_in_a_few_calls(make_app, monkeypatch, path, body, stream):
    monkeypatch.setattr("tests.api.conftest.FakeClient", WatchingClient)
    app = make_app()
    reply = app.http.post(path, json={"model": "test-model", **body, "stream": stream})
    assert reply.status_code == 200, reply.text
    assert app.engine.walk[-1] == "generate"
    assert len(app.engine.walk) <= MAX_CALLS, app.engine.walk
    assert len(app.engine.modules) <= MAX_MODULES, app.engine.modules


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": ["Hi", "Ho"]}),
    ],
)
def test_parameters_are_checked_once_and_fitted_to_each_prompt(make_app, monkeypatch, path, body):
    checked, calls = [], []

    def checking(sampling, model):
        checked.append(sampling)
        check_sampling(sampling, model)

    def fitting(prompt_token_ids, sampling, model):
        calls.append(list(prompt_token_ids))
        return fit_prompt(prompt_token_ids, sampling, model)

    for module in ("ostinato.api.preparation.generation", "ostinato.runtime.client.requests"):
        monkeypatch.setattr(f"{module}.check_sampling", checking)
        monkeypatch.setattr(f"{module}.fit_prompt", fitting)
    app = make_app()
    assert app.http.post(path, json=body).status_code == 200
    # The real client builds its requests in this way. The scripted one only records arguments.
    for token_ids, sampling, *_ in app.engine.requests:
        make_requests("r", token_ids, sampling, app.engine.model)
    assert calls == [token_ids for token_ids, *_ in app.engine.requests]
    assert len(checked) == 1


def test_many_prompts_take_no_more_checks_than_one(make_app, monkeypatch):
    app = make_app()
    checks = []
    convert = SamplingParams._convert

    def counting(sampling):
        checks.append(sampling)
        convert(sampling)

    monkeypatch.setattr(SamplingParams, "_convert", counting)
    counts = []
    for prompts in (["a"], ["a"] * 1000):
        checks.clear()
        body = {"prompt": prompts, "min_tokens": 2, "bad_words": ["x"]}
        assert app.http.post("/v1/completions", json=body).status_code == 200
        counts.append(len(checks))
    assert 1 <= counts[0] == counts[1]
