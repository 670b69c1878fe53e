"""Replies of `/v1/responses` with many log-probabilities: what is encoded in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.api.http import sse
from ostinato.api.http.json_parts import json_parts
from ostinato.api.responses import reply
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.text.chat_template import ChatTemplate
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.outputs import FinishReason, TokenLogprobs
from tests.api.fake_client import scripted
from tests.runtime.text import tokenizer_builders

WITH = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


@pytest.fixture
def make(make_app):
    def make(script: Any, **server: Any) -> Any:
        template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
        return make_app(
            script,
            tokenizer=Tokenizer(tokenizer_builders.byte_level_bpe(), {}, template),
            max_model_len=4000,
            server=ServerConfig(**server),
        )

    return make


def post(app: Any, **fields: object) -> Any:
    return app.http.post("/v1/responses", json={"input": "Hi", **fields})


def test_events_with_the_whole_text_are_encoded_in_parts(make, monkeypatch):
    entries = [TokenLogprobs(-0.5, 1, [5], [-0.5])] * 1000
    app = make([scripted("Hello", [5] * 1000, logprobs=entries, finish_reason=FinishReason.stop)])
    in_parts = []

    def noting(value: object) -> Any:
        in_parts.append(type(value).__struct_config__.tag)
        return json_parts(value)

    monkeypatch.setattr(sse, "json_parts", noting)
    text = post(app, **WITH, stream=True).text
    names = [
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert in_parts == names
    events = [json.loads(line[6:]) for line in text.splitlines() if line[:6] == "data: "]
    assert [one["type"] for one in events][-5:] == names
    shown = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert len(shown) == 1000
    assert events[-5]["logprobs"] == events[-4]["logprobs"] == shown
    in_parts.clear()
    post(app, stream=True)
    assert "response.output_text.delta" in in_parts
    stored = app.http.get(f"/v1/responses/{events[-1]['response']['id']}").json()
    assert stored["output"] == events[-1]["response"]["output"]


def test_a_reply_above_the_limit_of_the_store_is_not_encoded_for_it(make, monkeypatch):
    entries = [TokenLogprobs(-0.5, 1, [5], [-0.5])] * 30_000
    script = [scripted("Hello", [5] * 30_000, logprobs=entries, finish_reason=FinishReason.stop)]
    app = make(script, response_store_mib=0.5)
    sizes = []

    def noting(value: object) -> Any:
        for part in json_parts(value):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(reply, "json_parts", noting)
    answer = post(app, **WITH)
    assert len(answer.content) > 2 << 20
    assert 1 << 19 < sum(sizes) < 1 << 20
    assert app.http.get(f"/v1/responses/{answer.json()['id']}").status_code == 404
