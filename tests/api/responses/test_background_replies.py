"""`/v1/responses` in the background: polled, followed again, cancelled and deleted."""

from __future__ import annotations

import json
from typing import Any

from ostinato.runtime.types.outputs import FinishReason
from tests.api.fake_client import scripted
from tests.api.responses.scripted_answer import post, prompt
from tests.api.responses.test_responses import TOOL
from tests.waiting import wait_until

WAITING = (scripted("Hel", [5]), None, scripted("lo", [6], finish_reason=FinishReason.stop))


def get(app: Any, answer: dict[str, Any], **query: object) -> Any:
    return app.http.get(f"/v1/responses/{answer['id']}", params=query)


def until(app: Any, answer: dict[str, Any], status: str) -> dict[str, Any]:
    """The response when it has this status and, if it is in progress, its first text."""

    def is_there() -> bool:
        present = get(app, answer).json()
        assert present["status"] in ("queued", "in_progress", status)
        return present["status"] == status and (status != "in_progress" or present["output"])

    wait_until(is_there)
    return get(app, answer).json()


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_polling(make):
    app = make(WAITING)
    answer = post(app, background=True).json()
    assert (answer["status"], answer["output"], answer["background"]) == ("queued", [], True)
    (item,) = until(app, answer, "in_progress")["output"]
    url = f"/v1/responses/{answer['id']}/input_items"
    assert app.http.get(url).json()["data"][0]["content"][0]["text"] == "Hi"
    assert (item["content"][0]["text"], item["status"]) == ("Hel", "in_progress")
    app.engine.released.set()
    whole = until(app, answer, "completed")
    assert whole["output"][0]["content"][0]["text"] == "Hello"
    assert whole["usage"]["output_tokens"] == 2
    post(app, previous_response_id=answer["id"], input="more")
    assert "[assistant]Hello" in prompt(app)


def test_cancel(make):
    app = make(WAITING)
    answer = post(app, background=True).json()
    until(app, answer, "in_progress")
    path = f"/v1/responses/{answer['id']}/cancel"
    cancelled = app.http.post(path).json()
    assert (cancelled["status"], len(app.engine.aborted)) == ("cancelled", 1)
    assert cancelled["output"][0]["content"][0]["text"] == "Hel"
    assert app.http.post(path).json() == get(app, answer).json() == cancelled
    assert app.http.post("/v1/responses/resp_none/cancel").status_code == 404


def test_a_call_that_is_cancelled_is_not_continued(make):
    app = make((scripted('<tool_call>\n{"name": "add", "arguments": {"a": 1', [5]), None))
    answer = post(app, background=True, tools=[TOOL], tool_choice="required").json()
    until(app, answer, "in_progress")
    cancelled = app.http.post(f"/v1/responses/{answer['id']}/cancel").json()
    (call,) = cancelled["output"]
    assert (call["arguments"], call["status"]) == ('{"a": 1', "incomplete")
    app.engine.released.set()
    assert post(app, previous_response_id=answer["id"], input="more").status_code == 200


def test_cancel_at_once(make):
    app = make((None,))
    answer = post(app, background=True).json()
    cancelled = app.http.post(f"/v1/responses/{answer['id']}/cancel").json()
    assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
    assert app.service.background.get(answer["id"]) is None


def test_only_what_runs_in_the_background_can_be_cancelled(app):
    answer = post(app).json()
    error = app.http.post(f"/v1/responses/{answer['id']}/cancel").json()["error"]
    assert error["param"] == "response_id"
    assert "background=true" in error["message"]


def test_delete_ends_it(make):
    app = make(WAITING)
    answer = post(app, background=True).json()
    wait_until(lambda: app.engine.requests)
    assert app.http.delete(f"/v1/responses/{answer['id']}").json()["deleted"]
    assert get(app, answer).status_code == 404
    assert len(app.engine.aborted) == 1


def test_a_failure(make):
    app = make([scripted("a", [5]), RuntimeError("secret")])
    failed = until(app, post(app, background=True).json(), "failed")
    assert (failed["error"]["code"], failed["output"][0]["status"]) == (
        "internal_error",
        "incomplete",
    )
    assert "secret" not in json.dumps(failed)


def test_a_stream_that_is_followed_again(make):
    app = make(WAITING)
    app.engine.released.set()
    first = events(post(app, background=True, stream=True).text)
    kinds = [one["type"].removeprefix("response.") for one in first]
    assert kinds[:3] == ["created", "queued", "in_progress"]
    assert kinds[-1] == "completed"
    answer = first[-1]["response"]
    assert get(app, answer).json() == answer
    assert events(get(app, answer, stream=True).text) == first
    rest = events(get(app, answer, stream=True, starting_after=4).text)
    assert rest == first[5:]
    assert get(app, answer, stream=True, starting_after=999).text == ""
    assert events(get(app, answer, stream=True, starting_after=-1).text) == first
    refused = get(app, answer, stream=True, starting_after=-2)
    assert refused.status_code == 400
    assert "must be at least -1" in refused.json()["error"]["message"]


def test_a_stream_that_was_not_asked_for(app):
    for fields in ({}, {"background": True}):
        answer = post(app, **fields).json()
        error = get(app, answer, stream=True).json()["error"]
        assert (error["param"], error["code"]) == ("stream", "invalid_value")
    wrong = app.http.get(f"/v1/responses/{answer['id']}", params={"stream": "maybe"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["type"] == "invalid_request_error"


def test_it_needs_the_store(make):
    error = post(make(response_store_mib=0), background=True).json()["error"]
    assert error["param"] == "background"


def test_how_many(make, monkeypatch):
    monkeypatch.setattr("ostinato.api.service.background.MAX_RUNNING", 2)
    app = make((None,))
    answers = [post(app, background=True).json() for _ in range(2)]
    full = post(app, background=True)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_requests")
    for answer in answers:
        app.http.post(f"/v1/responses/{answer['id']}/cancel")
    assert post(app, background=True).status_code == 200
