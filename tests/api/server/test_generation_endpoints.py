"""Chat and text completions over a scripted engine: answers, streams, aborts."""

from __future__ import annotations

import asyncio
import json

import pytest

from ostinato.api.server.app import create_app
from ostinato.conf.schema import SamplingSection
from ostinato.runtime.types.outputs import FinishReason
from tests.api.answers import error_of, events
from tests.api.fake_client import HELLO, scripted


class TestChat:
    def test_whole(self, app):
        response = app.chat(request_id="me")
        assert response.status_code == 200
        body = response.json()
        assert body["id"] == "chatcmpl-me"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        prompt, *_ = app.engine.requests[0]
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 3,
            "total_tokens": len(prompt) + 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert app.engine.tokenizer.decode(prompt, skip_special_tokens=False) == (
            "<|begin|>user\nHi<|end|><|begin|>assistant\n"
        )

    def test_stream_exact_bytes(self, app, monkeypatch):
        monkeypatch.setattr("time.time", lambda: 1_700_000_123.9)
        response = app.chat(request_id="me", stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        start = (
            b'data: {"id":"chatcmpl-me","object":"chat.completion.chunk","created":1700000123,'
            b'"model":"test-model","system_fingerprint":"fp-bitwise-test","choices":[{"index":0,"delta":'
        )
        assert response.content == b"".join(
            [
                start,
                b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n',
                start,
                b'{"content":"Hel"},"logprobs":null,"finish_reason":null}]}\n\n',
                start,
                b'{"content":"lo"},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
                b"\n\n",
                b"data: [DONE]\n\n",
            ]
        )

    def test_usage_at_the_end_of_a_stream(self, app):
        *chunks, last, done = events(
            app.chat(stream=True, stream_options={"include_usage": True}).text
        )
        assert done == "[DONE]"
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
        assert [chunk["usage"] for chunk in chunks] == [None] * 3

    def test_usage_in_every_chunk(self, app):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last, _ = events(app.chat(stream=True, stream_options=options, n=2).text)
        counts: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
            counts[chunk["choices"][0]["index"]].append(usage["completion_tokens"])
        # Each completion counts its own tokens. The chunk with the role counts 0.
        assert counts == {0: [0, 1, 3], 1: [0, 1, 3]}
        assert last["usage"]["completion_tokens"] == 6

    def test_continuous_usage_needs_include_usage(self, app):
        options = {"continuous_usage_stats": True}
        *chunks, _ = events(app.chat(stream=True, stream_options=options).text)
        assert [chunk for chunk in chunks if "usage" in chunk] == []

    def test_several_completions(self, app):
        body = app.chat(n=3).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 9
        *chunks, _ = events(app.chat(n=2, stream=True).text)
        texts = {0: "", 1: ""}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == {0: "Hello", 1: "Hello"}

    def test_continuing_the_last_message(self, app):
        messages = [{"role": "assistant", "content": "Once"}]
        app.chat(messages=messages, continue_final_message=True)
        prompt, *_ = app.engine.requests[0]
        assert app.engine.tokenizer.decode(prompt, skip_special_tokens=False) == (
            "<|begin|>assistant\nOnce"
        )

    def test_variables_and_names_reach_the_template(self, app):
        app.chat(
            messages=[{"role": "user", "name": "Ada", "content": "Hi"}],
            chat_template_kwargs={"prefix": "So"},
        )
        prompt, *_ = app.engine.requests[0]
        assert app.engine.tokenizer.decode(prompt, skip_special_tokens=False) == (
            "<|begin|>user Ada\nHi<|end|><|begin|>assistant\nSo"
        )

    @pytest.mark.parametrize("label", ["user", "safety_identifier", "prompt_cache_key"])
    def test_labels_change_nothing(self, app, label):
        app.chat(**{label: "someone"})
        app.chat()
        assert app.engine.requests[0] == app.engine.requests[1]

    def test_documents_reach_a_template_that_shows_them(self, app):
        documents = [{"title": "One", "text": "fox"}, {"title": "Two", "text": "dog"}]
        template = "{% for one in documents %}{{ one.title }}: {{ one.text }} {% endfor %}"
        app.chat(documents=documents, chat_template=template)
        prompt, *_ = app.engine.requests[0]
        assert app.engine.tokenizer.decode(prompt).strip() == "One: fox Two: dog"
        error = error_of(app.chat(documents=documents))
        assert (error["param"], error["code"]) == ("documents", "unsupported_parameter")
        assert app.chat(documents=[]).status_code == 200

    def test_a_template_that_refuses(self, app):
        response = app.chat(messages=[{"role": "user", "content": "refuse me"}])
        assert response.status_code == 400
        assert error_of(response)["param"] == "messages"

    def test_a_model_without_a_tokenizer(self, make_app):
        response = make_app(tokenizer=None).chat()
        assert response.status_code == 400
        assert error_of(response)["code"] == "no_tokenizer"


class TestCompletions:
    def test_whole(self, app):
        body = app.complete(max_tokens=5, request_id="me").json()
        assert (body["id"], body["object"]) == ("cmpl-me", "text_completion")
        assert body["choices"] == [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]

    def test_token_ids_need_no_tokenizer(self, make_app):
        app = make_app(tokenizer=None)
        body = app.complete(prompt=[1, 2, 3], logprobs=1).json()
        assert app.engine.requests[0][0] == [1, 2, 3]
        tokens = body["choices"][0]["logprobs"]["tokens"]
        assert tokens == ["token_id:5", "token_id:6", "token_id:7"]

    def test_many_prompts(self, app):
        body = app.complete(prompt=["Hi", "the"], n=2).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert len(app.engine.requests) == 2
        *chunks, done = events(app.complete(prompt=[[1], [2], [3]], stream=True).text)
        texts = ["", "", ""]
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert (texts, done) == (["Hello"] * 3, "[DONE]")

    def test_logprob_offsets_in_a_stream(self, app):
        *chunks, _ = events(app.complete(stream=True, logprobs=0).text)
        offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
        assert offsets == [[0], [1], [2]]

    def test_a_long_prompt_is_encoded_as_a_short_one(self, make_app):
        app = make_app(max_model_len=100_000)
        text = "the quick brown fox " * 500
        app.complete(prompt=text)
        assert app.engine.requests[0][0] == app.engine.tokenizer.encode(text)

    def test_special_tokens_can_be_left_out(self, app):
        app.complete(add_special_tokens=False, cache_salt="s", priority=4)
        assert app.engine.requests[0][2:] == (4, "s")

    def test_the_servers_default_of_max_tokens(self, make_app):
        app = make_app(sampling=SamplingSection(max_tokens=3))
        app.complete()
        assert app.engine.requests[0][1].max_tokens == 3

    def test_one_failing_prompt_ends_the_reply_and_aborts_the_others(self, make_app):
        failing = scripted("", [], finish_reason=FinishReason.error, error="it broke")
        response = make_app([failing]).complete(prompt=["Hi", "the"])
        assert response.status_code == 500
        assert error_of(response)["message"] == "it broke"


async def asgi_post(app, path: str, body: dict, *, disconnect: asyncio.Event) -> list[dict]:
    """Send one POST through ASGI. The client disconnects when `disconnect` is set.

    The first bytes of the answer set it too.
    """
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[dict] = []

    async def receive():
        if messages:
            return messages.pop()
        await disconnect.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if message.get("body"):
            disconnect.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "state": {},
        "extensions": {},
        "asgi": {"version": "3.0"},
    }
    await app(scope, receive, send)
    return sent


class TestDisconnect:
    @pytest.mark.parametrize(
        ("prompt", "aborted"), [("Hi", ["cmpl-me"]), ([[1], [2]], ["cmpl-me-0", "cmpl-me-1"])]
    )
    def test_of_a_stream(self, make_app, prompt, aborted):
        app = make_app([HELLO[0], None])
        body = {"prompt": prompt, "stream": True, "request_id": "me"}

        async def scenario() -> list[dict]:
            return await asyncio.wait_for(
                asgi_post(
                    create_app(app.service), "/v1/completions", body, disconnect=asyncio.Event()
                ),
                240,
            )

        sent = asyncio.run(scenario())
        assert b"Hel" in sent[1]["body"]
        assert sorted(app.engine.aborted) == aborted
        assert app.engine.num_unfinished == 0

    def test_of_a_reply_that_is_not_streamed(self, make_app):
        app = make_app([HELLO[0], None])
        body = {"prompt": [[1], [2]], "request_id": "me"}

        async def scenario() -> None:
            disconnect = asyncio.Event()
            post = asyncio.create_task(
                asgi_post(create_app(app.service), "/v1/completions", body, disconnect=disconnect)
            )
            while len(app.engine.requests) < 2:
                await asyncio.sleep(0)
            disconnect.set()
            await asyncio.wait_for(post, 240)

        asyncio.run(scenario())
        assert sorted(app.engine.aborted) == ["cmpl-me-0", "cmpl-me-1"]
