"""Parts that several endpoints use: model names, ids, usage, log probabilities, tokenisation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from ostinato.api.openai import completions, tokenization
from ostinato.api.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    token_text,
)
from ostinato.api.preparation.generation import check_model
from ostinato.api.schemas.body_decoding import decode
from ostinato.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from ostinato.api.service.reply_state import Tally, new_id
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.outputs import TokenLogprobs
from tests.api.dialect_values import MODEL, PIECES, completion_body, encoded, output, preparation


def decoded(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


class TestGeneration:
    def test_unknown_model(self):
        check_model(None, MODEL)
        check_model("m", MODEL)
        with pytest.raises(InvalidRequestError) as refused:
            check_model("gpt-9", MODEL)
        assert (refused.value.status, refused.value.param, refused.value.code) == (
            404,
            "model",
            "model_not_found",
        )

    def test_ids(self):
        assert new_id("cmpl", "mine", "header's") == "cmpl-mine"
        assert new_id("cmpl", None, "header's") == "cmpl-header's"
        first, second = (new_id("cmpl", None, "") for _ in range(2))
        assert first.startswith("cmpl-")
        assert first != second

    def test_usage_counts_a_prompt_once_and_every_completion(self):
        requests = completions.to_generations(
            completion_body(n=2), [[1, 1], [1, 1, 1]], preparation(default_max_tokens=4)
        )
        tally = Tally.of(requests)
        for prompt_index, index, cached in ((0, 0, 1), (0, 1, 2), (1, 0, 2), (1, 1, 3)):
            one = output("", [1, 2], 2, index=index, num_cached_tokens=cached)
            tally.add(prompt_index, one)
        assert msgspec.to_builtins(tally.usage) == {
            "prompt_tokens": 5,
            "completion_tokens": 8,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 3},
        }


class TestLogprobs:
    def test_half_a_character(self):
        assert token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
        assert token_text("é".encode()) == "é"

    def test_minus_infinity_is_a_number_in_json(self):
        entry = TokenLogprobs(float("-inf"), 9, [1], [float("-inf")])
        assert '"logprob":-9999.0' in encoded(
            chat_logprobs([2], [entry], PIECES.__getitem__, num_top=1)
        )

    def test_the_sampled_token_joins_the_likeliest(self):
        entry = TokenLogprobs(-3.0, 4, [1, 2], [-0.5, -1.0])
        logprobs = completion_logprobs([4], [entry], PIECES.__getitem__, num_top=2, text_offset=5)
        shown = decoded(logprobs)
        assert shown["top_logprobs"] == [{"a": -0.5, " b": -1.0, "bytes:\\xa6\\x86": -3.0}]
        assert shown["text_offset"] == [5]

    def test_tokens_as_ids(self):
        entry = TokenLogprobs(-0.5, 1, [4, 1], [-0.5, -1.0])
        logprobs = completion_logprobs(
            [4], [entry], PIECES.__getitem__, num_top=2, text_offset=0, as_ids=True
        )
        shown = decoded(logprobs)
        assert shown["tokens"] == ["token_id:4"]
        assert shown["top_logprobs"] == [{"token_id:4": -0.5, "token_id:1": -1.0}]
        (content,) = decoded(
            chat_logprobs([4], [entry], PIECES.__getitem__, num_top=1, as_ids=True)
        )["content"]
        assert (content["token"], content["bytes"]) == ("token_id:4", [0xA6, 0x86])
        assert content["top_logprobs"][0]["token"] == "token_id:4"

    def test_the_first_token_of_a_prompt_has_no_logprob(self):
        entry = TokenLogprobs(-0.5, 2, [1], [-0.1])
        logprobs = completion_logprobs(
            [1, 2], [None, entry], PIECES.__getitem__, num_top=1, text_offset=0
        )
        assert decoded(logprobs) == {
            "tokens": ["a", " b"],
            "token_logprobs": [None, -0.5],
            "top_logprobs": [None, {"a": -0.1, " b": -0.5}],
            "text_offset": [0, 1],
        }
        scores = asyncio.run(prompt_logprobs([1, 2], [entry], PIECES.__getitem__, num_top=1))
        assert decoded(scores) == [
            None,
            {
                "1": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
                "2": {"logprob": -0.5, "rank": 2, "decoded_token": " b"},
            },
        ]


class TestTokenization:
    @pytest.mark.parametrize(
        "fields", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}]
    )
    def test_exactly_one_of_prompt_and_messages(self, fields):
        body = decode(json.dumps(fields).encode(), TokenizeRequest)
        with pytest.raises(InvalidRequestError, match="either prompt or messages"):
            tokenization.check(body)

    def test_ids_outside_of_the_vocabulary(self, tokenizer):
        with pytest.raises(
            InvalidRequestError, match=r"tokens has id 100, but the vocabulary of .* is \[0, 100\)"
        ):
            tokenization.to_text(DetokenizeRequest(tokens=[1, 100]), tokenizer, MODEL)
