"""Drafts in a real server: equal answers, predictions in the usage, and crashes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.json_requests import CHAT, COMPLETIONS
from tests.e2e.server_process import HTTP, ServerProcess
from tests.e2e.streams import ZOO, body
from tests.waiting import repeat_if_late

TEXT = "The scheduler decides at every step which sequences compute how many tokens. "
FORMAT = {"type": "json_schema", "json_schema": {"name": "zoo", "schema": ZOO, "strict": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        "speculation.method=auto", "speculation.adaptive=false", "server.restart_backoff_s=0.01"
    ) as process:
        yield process


def post(server: ServerProcess, path: str, request: dict[str, Any]) -> dict[str, Any]:
    reply = HTTP.post(server.url + path, json=request, timeout=200)
    assert reply.status_code == 200, reply.text
    return reply.json()


def drafted(server: ServerProcess) -> float:
    lines = HTTP.get(f"{server.url}/metrics").text.splitlines()
    name = "vllm:spec_decode_num_accepted_tokens_total{"
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


REQUESTS = [
    *((COMPLETIONS, body(number)) for number in (2, 3, 4)),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "animals"}],
            "response_format": FORMAT,
            "max_tokens": 200,
            "seed": 3,
        },
    ),
]


@pytest.mark.parametrize(("path", "request_body"), REQUESTS)
def test_an_answer_is_that_of_plain_decoding(server, path, request_body):
    """The second request with drafts may take them from the answer to the first one."""
    whole = {**request_body, "max_tokens": 60 if path == COMPLETIONS else 200}
    for name in ("stream", "stream_options"):
        whole.pop(name, None)
    plain = post(server, path, {**whole, "speculation": False})
    before = drafted(server)
    for _ in range(2):
        assert post(server, path, whole)["choices"] == plain["choices"]
    assert drafted(server) > before


def test_a_prediction_is_counted_in_the_usage(server):
    request = {"messages": [{"role": "user", "content": "Tell me more"}], "seed": 5}
    request |= {"max_tokens": 64, "ignore_eos": True, "cache_salt": "prediction"}
    plain = post(server, CHAT, {**request, "speculation": False})
    assert "completion_tokens_details" not in plain["usage"]
    answer = plain["choices"][0]["message"]["content"]
    for content in (answer, [{"type": "text", "text": answer}]):
        request["cache_salt"] += "x"  # so that no earlier answer is found
        request["prediction"] = {"type": "content", "content": content}
        reply = post(server, CHAT, request)
        assert reply["choices"] == plain["choices"]
        details = reply["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 30
        assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    stream["cache_salt"] = "another"
    events = HTTP.post(server.url + CHAT, json={**request, **stream}, timeout=200).text
    usage = json.loads(events.split("data: ")[-2])["usage"]
    assert usage["completion_tokens_details"] == details
    request["prediction"] = {"type": "content", "content": "1 2 3 4 5 6 7 8 9"}
    reply = post(server, CHAT, {**request, "cache_salt": "wrong"})
    assert reply["choices"] == plain["choices"]
    assert reply["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_the_log_line_counts_the_drafts_of_a_request(server):
    """The second request takes drafts from the answer to the first one, so it surely has some."""
    request = {"prompt": TEXT * 6, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    for request_id in ("earlier", "counted"):
        post(server, COMPLETIONS, {**request, "request_id": request_id})
    line = server.wait_for_line("cmpl-counted done")
    counts = re.search(r" drafted=(\d+) accepted=(\d+) ", line + " ")
    assert counts is not None, line
    assert 0 < int(counts[2]) <= int(counts[1])


def test_a_prediction_contradicts_a_request_without_drafts(server):
    request = {
        "messages": [{"role": "user", "content": "Hi"}],
        "prediction": {"content": "Hello"},
        "speculation": False,
    }
    reply = HTTP.post(server.url + CHAT, json=request)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prediction")


def test_a_stop_string_ends_within_the_tokens_of_one_step(server):
    """The text repeats, so a step with drafts may give several tokens at once."""
    request = {"prompt": TEXT * 6, "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    plain = post(server, COMPLETIONS, {**request, "speculation": False})["choices"][0]["text"]
    stop = plain[len(plain) // 2 :][:3]
    replies = [
        post(server, COMPLETIONS, {**request, "stop": [stop], "speculation": drafts})
        for drafts in (False, True)
    ]
    assert replies[0]["choices"] == replies[1]["choices"]
    assert replies[0]["usage"] == replies[1]["usage"]
    assert replies[0]["choices"][0]["text"] == plain[: plain.index(stop)]


def test_a_stream_survives_the_death_of_the_engine(server):
    request = {"prompt": TEXT * 6, "max_tokens": 150, "temperature": 1.0, "seed": 9}
    request |= {"ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    plain = post(server, COMPLETIONS, {**request, "speculation": False})["choices"][0]

    def attempt() -> tuple[list[int], list[float]] | None:
        token_ids: list[int] = []
        logprobs: list[float] = []
        is_killed = False
        with HTTP.stream(
            "POST", server.url + COMPLETIONS, json={**request, "stream": True}
        ) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                token_ids += choice.get("token_ids") or []
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                if len(token_ids) > 20 and not is_killed:
                    if not server.kill_busy_engine():
                        return None
                    is_killed = True
        return token_ids, logprobs

    token_ids, logprobs = repeat_if_late(attempt)
    assert token_ids == plain["token_ids"]
    assert logprobs == plain["logprobs"]["token_logprobs"]


def test_a_server_takes_predictions_by_default():
    prediction = {"type": "content", "content": TEXT}
    messages = [{"role": "user", "content": TEXT}]
    with ServerProcess("speculation.method=null") as server:
        request = {"messages": messages, "temperature": 0, "max_tokens": 40}
        whole = post(server, CHAT, {**request, "prediction": prediction})
        plain = post(server, CHAT, {**request, "speculation": False})
    assert whole["choices"][0]["message"] == plain["choices"][0]["message"]
