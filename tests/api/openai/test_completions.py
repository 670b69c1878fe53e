"""Text completions: bodies become engine requests, and outputs become chunks and responses."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from ostinato.api.openai import completions
from ostinato.api.openai.preparation import PreparedCompletion, prepare_completion
from ostinato.api.preparation.generation import Generation
from ostinato.api.preparation.preparation import Arrival
from ostinato.api.service.reply_state import ReplyOptions
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.params import SamplingParams
from tests.api.dialect_values import (
    HEAD,
    PIECES,
    PLAIN,
    collected,
    completion_body,
    encoded,
    no_usage,
    output,
    preparation,
)


class TestPrompts:
    def test_kinds(self):
        assert completions.prompts(completion_body(prompt="a")) == ["a"]
        assert completions.prompts(completion_body(prompt=["a", "b"])) == ["a", "b"]
        assert completions.prompts(completion_body(prompt=[1, 2])) == [[1, 2]]
        assert completions.prompts(completion_body(prompt=[[1], [2, 3]])) == [[1], [2, 3]]

    @pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], [[1], 2]])
    def test_empty_or_mixed(self, prompt):
        with pytest.raises(InvalidRequestError) as refused:
            completions.prompts(completion_body(prompt=prompt))
        assert refused.value.param == "prompt"

    def test_too_many(self):
        with pytest.raises(InvalidRequestError, match="make 4096 sequences with n"):
            completions.prompts(completion_body(prompt=["a"] * 1024, n=4))


class TestToRequests:
    def test_completions_name_their_own_fields(self):
        with pytest.raises(InvalidRequestError) as refused:
            completions.to_generations(completion_body(), [[1], [1] * 20], preparation())
        assert refused.value.param == "prompt"

    def test_one_request_per_prompt(self):
        body = {"prompt": [[1], [2, 3], [4]], "logprobs": 2}
        arrival = Arrival(request_id="r")
        prepared = prepare_completion(preparation(), encoded(body).encode(), arrival)
        requests = prepared.generations
        assert [(one.request_id, one.prompt_token_ids) for one in requests] == [
            ("cmpl-r-0", [1]),
            ("cmpl-r-1", [2, 3]),
            ("cmpl-r-2", [4]),
        ]
        assert {one.sampling.logprobs for one in requests} == {2}
        assert [one.sampling.max_tokens for one in requests] == [19, 18, 19]
        # A request is the same after it was sent to another process.
        again = msgspec.json.decode(msgspec.json.encode(prepared), type=PreparedCompletion)
        assert again.generations == requests


class TestChunks:
    def test_text(self):
        chunk = asyncio.run(
            completions.to_chunk(HEAD, 3, output("a", [1], 1), PIECES.__getitem__, options=PLAIN)
        )
        assert encoded(chunk) == (
            '{"id":"chatcmpl-1","object":"text_completion","created":7,"model":"m",'
            '"system_fingerprint":"fp",'
            '"choices":[{"index":3,"text":"a","logprobs":null,"finish_reason":null}]}'
        )

    def test_held_back(self):
        one = output("", [1], 1)
        chunk = completions.to_chunk(HEAD, 0, one, PIECES.__getitem__, options=PLAIN)
        assert asyncio.run(chunk) is None

    def test_offsets_go_on_from_chunk_to_chunk(self):
        offsets = completions.TextOffsets(PIECES.__getitem__)
        assert [offsets.advance(0, [1, 2]), offsets.advance(1, [2]), offsets.advance(0, [1])] == [
            0,
            0,
            3,
        ]


class TestResponses:
    def test_choices_are_numbered_over_all_prompts(self):
        answers = collected()
        answers[(1, 0)] = answers[(0, 0)]
        response = asyncio.run(
            completions.to_response(
                HEAD,
                [Generation(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(n=2))]
                * 2,
                answers,
                PIECES.__getitem__,
                options=ReplyOptions(num_top_logprobs=0),
                usage=no_usage(),
            )
        )
        assert [(choice.index, choice.text) for choice in response.choices] == [
            (0, "a0"),
            (1, "a1"),
            (2, "a0"),
        ]
        assert msgspec.json.decode(encoded(response.choices[0].logprobs)) == {
            "tokens": ["a", " b"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"a": -0.5}, {" b": -0.5}],
            "text_offset": [0, 1],
        }
