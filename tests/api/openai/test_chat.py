"""Chat completions: bodies become engine requests, and outputs become chunks and responses."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from ostinato.api.chat.chat_deltas import ChatDelta, CollectedAnswer
from ostinato.api.chat.chat_generation import to_generation
from ostinato.api.chat.chat_prompt import adds_generation_prompt
from ostinato.api.chat.tools import template_messages
from ostinato.api.openai import chat
from ostinato.api.parsing.events import (
    CallArguments,
    CallBegins,
    Content,
    Event,
    Message,
    Reasoning,
)
from ostinato.api.preparation.generation import Generation
from ostinato.api.service.reply_state import CollectedCompletion, ReplyOptions, Tally
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.outputs import FinishReason, RequestOutput, TokenLogprobs
from ostinato.runtime.types.params import SamplingParams
from tests.api.dialect_values import (
    HEAD,
    MODEL,
    PIECES,
    PLAIN,
    chat_body,
    collected,
    encoded,
    no_usage,
    output,
    preparation,
)


def sampling_of_chat(
    *, model: ServedModel = MODEL, default_max_tokens: int | None = None, **fields: object
) -> SamplingParams:
    body = chat_body(**fields)
    chat.check(body)
    source = preparation(model, default_max_tokens)
    return to_generation(source, body, [1, 2, 3], request_id="r").sampling


class TestToGeneration:
    def test_nothing_given(self):
        assert sampling_of_chat() == SamplingParams(max_tokens=17)

    def test_everything_given(self):
        fields: dict[str, Any] = {
            "n": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": -0.3,
            "seed": 9,
            "max_tokens": 8,
            "min_tokens": 2,
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        assert sampling_of_chat(
            **fields, stop=["a", "b"], stop_token_ids=[4], logit_bias={"5": -100}
        ) == SamplingParams(**fields, stop=("a", "b"), stop_token_ids=(4,), logit_bias={5: -100.0})

    def test_one_stop_string(self):
        assert sampling_of_chat(stop="END").stop == ("END",)

    @pytest.mark.parametrize("top_logprobs", [None, 0, 3])
    def test_logprobs_of_chat(self, top_logprobs):
        assert sampling_of_chat(logprobs=True, top_logprobs=top_logprobs).logprobs == (
            top_logprobs or 0
        )
        assert sampling_of_chat(logprobs=False).logprobs is None
        assert sampling_of_chat(top_logprobs=0).logprobs is None

    def test_the_models_defaults_then_the_requests_values(self):
        model = msgspec.structs.replace(MODEL, default_sampling={"temperature": 0.6, "top_k": 20.0})
        assert sampling_of_chat(model=model, temperature=0) == SamplingParams(
            temperature=0, top_k=20, max_tokens=17
        )

    def test_the_servers_default_of_max_tokens_shrinks_to_the_room(self):
        assert sampling_of_chat(default_max_tokens=5).max_tokens == 5
        assert sampling_of_chat(default_max_tokens=500).max_tokens == 17
        assert sampling_of_chat(default_max_tokens=5, max_tokens=9).max_tokens == 9

    def test_a_prompt_that_is_too_long_leaves_room_for_an_answer(self):
        body, long = chat_body(truncate_prompt_tokens=-1), list(range(1, 50))

        def fitted(**settings: int) -> tuple[list[int], int | None]:
            one = to_generation(preparation(**settings), body, long, request_id="r")
            return one.prompt_token_ids, one.sampling.max_tokens

        assert fitted(default_max_tokens=3) == (long[-17:], 3)
        assert fitted(default_max_tokens=500) == (long[-15:], 5)
        assert fitted() == (long[-15:], 5)

    def test_the_newer_name_of_max_tokens(self):
        assert sampling_of_chat(max_completion_tokens=4).max_tokens == 4
        assert sampling_of_chat(max_completion_tokens=4, max_tokens=4).max_tokens == 4

    def test_priority_and_salt(self):
        body = chat_body(priority=-3, cache_salt="me")
        request = to_generation(preparation(), body, [1], request_id="r")
        assert (request.request_id, request.priority, request.cache_salt) == ("r", -3, "me")

    @pytest.mark.parametrize(
        ("fields", "param", "text"),
        [
            ({"temperature": 2.1}, "temperature", "temperature must be in [0, 2], got 2.1"),
            ({"temperature": -0.1}, "temperature", "temperature must be in [0, 2], got -0.1"),
            ({"top_p": 0}, "top_p", "top_p must be in (0, 1], got 0.0"),
            ({"n": 0}, "n", "n must be in [1, 128], got 0"),
            ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
            (
                {"max_completion_tokens": 0},
                "max_completion_tokens",
                "max_completion_tokens must be at least 1, got 0",
            ),
            (
                {"logprobs": True, "top_logprobs": 21},
                "top_logprobs",
                "top_logprobs must be null or in [0, 20], got 21",
            ),
            ({"top_logprobs": 1}, "top_logprobs", "top_logprobs needs logprobs=true"),
            ({"stream_options": {}}, "stream_options", "stream_options needs stream=true"),
            (
                {"max_tokens": 1, "max_completion_tokens": 2},
                "max_completion_tokens",
                "max_tokens=1 and max_completion_tokens=2 are two names of one limit; give one",
            ),
            ({"seed": 1 << 63}, "seed", f"seed must be null or a 64-bit integer, got {1 << 63}"),
            (
                {"stop": ""},
                "stop",
                "stop must be at most 16 strings of 1 to 4096 characters, got ('',)",
            ),
            (
                {"stop_token_ids": [100]},
                "stop_token_ids",
                "stop_token_ids names token id 100, but the vocabulary of m is [0, 100)",
            ),
            (
                {"logit_bias": {"5": 101}},
                "logit_bias",
                "logit_bias must be biases in [-100, 100], got {5: 101.0}",
            ),
        ],
    )
    def test_out_of_range(self, fields, param, text):
        with pytest.raises(InvalidRequestError) as refused:
            sampling_of_chat(**fields)
        assert (refused.value.param, str(refused.value)) == (param, text)
        assert refused.value.status == 400

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_more_than_the_context_holds(self, name):
        with pytest.raises(InvalidRequestError) as refused:
            sampling_of_chat(**{name: 18})
        assert refused.value.param == name
        assert refused.value.code == "context_length_exceeded"

    def test_a_prompt_longer_than_the_context(self):
        with pytest.raises(InvalidRequestError) as refused:
            to_generation(preparation(), chat_body(), [1] * 20, request_id="r")
        assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")


class TestTemplateMessages:
    def test_parts_are_joined_and_names_kept(self):
        body = chat_body(
            messages=[
                {"role": "system", "content": "s"},
                {
                    "role": "user",
                    "name": "Ada",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
            ]
        )
        assert template_messages(body.messages) == [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a\nb", "name": "Ada"},
        ]

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, True),
            ({"continue_final_message": True}, False),
            ({"add_generation_prompt": False}, False),
            ({"add_generation_prompt": True, "continue_final_message": True}, True),
        ],
    )
    def test_whether_an_answer_follows(self, fields, expected):
        assert adds_generation_prompt(chat_body(**fields)) is expected


def parsed(one: RequestOutput) -> ChatDelta:
    """The `ChatDelta` of an answer with content only."""
    events = [Content(one.text_delta)] if one.text_delta else []
    return ChatDelta(one, events, one.finish_reason and one.finish_reason.value)


class TestChunks:
    def chunks(self, one: RequestOutput, options: ReplyOptions = PLAIN, **more: Any) -> list[str]:
        chunks = asyncio.run(
            chat.to_chunks(HEAD, parsed(one), PIECES.__getitem__, options=options, **more)
        )
        return [encoded(one) for one in chunks]

    START = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","system_fingerprint":"fp","choices":'

    def test_the_first_chunk_has_the_role(self):
        assert self.chunks(output("a", [1], 1)) == [
            self.START + '[{"index":0,"delta":{"role":"assistant","content":""},'
            '"logprobs":null,"finish_reason":null}]}',
            self.START + '[{"index":0,"delta":{"content":"a"},'
            '"logprobs":null,"finish_reason":null}]}',
        ]

    def test_held_back_text_makes_no_chunk(self):
        assert self.chunks(output("", [1], 2)) == []

    def test_the_end(self):
        one = output("", [1], 3, index=1, finish_reason=FinishReason.stop, stop_reason="END")
        assert self.chunks(one) == [
            self.START + '[{"index":1,"delta":{},"logprobs":null,"finish_reason":"stop",'
            '"stop_reason":"END"}]}'
        ]

    def test_the_end_with_text(self):
        one = output("a", [1], 3, finish_reason=FinishReason.length)
        assert self.chunks(one) == [
            self.START + '[{"index":0,"delta":{"content":"a"},"logprobs":null,'
            '"finish_reason":"length","stop_reason":null}]}'
        ]

    def test_logprobs_come_even_when_the_text_is_held_back(self):
        one = output("", [3], 2, logprobs=[TokenLogprobs(-0.5, 1, [3, 1], [-0.5, -1.0])])
        assert self.chunks(one, ReplyOptions(num_top_logprobs=1)) == [
            self.START + '[{"index":0,"delta":{"content":""},"logprobs":{"content":['
            '{"token":"bytes:\\\\xf0\\\\x9f","logprob":-0.5,"bytes":[240,159],"top_logprobs":'
            '[{"token":"bytes:\\\\xf0\\\\x9f","logprob":-0.5,"bytes":[240,159]}]}]},'
            '"finish_reason":null}]}'
        ]

    def test_token_ids_come_even_when_the_text_is_held_back(self):
        assert self.chunks(output("", [3], 2), ReplyOptions(return_token_ids=True)) == [
            self.START + '[{"index":0,"delta":{"content":""},"logprobs":null,'
            '"finish_reason":null,"token_ids":[3]}]}'
        ]

    def test_an_echo_is_the_first_text(self):
        first, second = self.chunks(output("a", [1], 1), echo="So ")
        assert '"delta":{"role":"assistant","content":"So "}' in first
        assert '"delta":{"content":"a"}' in second
        assert len(self.chunks(output("a", [1], 2), echo="So ")) == 1

    def test_usage(self):
        tally = Tally.of(
            [to_generation(preparation(default_max_tokens=1), chat_body(), [1] * 4, request_id="")]
        )
        tally.add(0, output("", [1], 1, num_cached_tokens=3))
        usage = (
            '"usage":{"prompt_tokens":4,"completion_tokens":1,"total_tokens":5,'
            '"prompt_tokens_details":{"cached_tokens":3}}}'
        )
        assert encoded(chat.to_chunk(HEAD, [], tally.usage)) == self.START + "[]," + usage
        assert self.chunks(output("a", [1], 2), usage=tally.usage)[0].endswith("}]," + usage)
        assert self.chunks(output("a", [1], 2), usage=None)[0].endswith('}],"usage":null}')


class TestDeltas:
    def test_everything_in_one_output(self):
        events = [
            Reasoning("so "),
            Reasoning("it is"),
            Content("a"),
            CallBegins(0, "f", "call_1"),
            CallArguments(0, '{"x":'),
            CallArguments(0, " 1}"),
            CallBegins(1, "g", "call_2"),
            CallArguments(1, "{}"),
        ]
        assert encoded(chat.to_delta(events)) == (
            '{"content":"a","reasoning":"so it is","reasoning_content":"so it is","tool_calls":['
            '{"index":0,"id":"call_1","type":"function","function":'
            '{"name":"f","arguments":"{\\"x\\": 1}"}},'
            '{"index":1,"id":"call_2","type":"function","function":{"name":"g","arguments":"{}"}}]}'
        )

    def test_a_call_that_goes_on(self):
        assert encoded(chat.to_delta([CallArguments(1, "2}")])) == (
            '{"tool_calls":[{"index":1,"function":{"arguments":"2}"}}]}'
        )

    def test_nothing(self):
        assert encoded(chat.to_delta([])) == "{}"


def message_of(*events: Event) -> Message:
    message = Message()
    message.add(events)
    return message


class TestResponses:
    def test_all_choices_in_order(self):
        response = asyncio.run(
            chat.to_response(
                HEAD,
                Generation(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(n=2)),
                {
                    index: CollectedAnswer(
                        completion=one,
                        message=message_of(Content(one.text)),
                        finish_reason="stop",
                    )
                    for (_, index), one in collected().items()
                },
                PIECES.__getitem__,
                options=PLAIN,
                usage=no_usage(),
            )
        )
        assert msgspec.to_builtins(response) == {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 7,
            "system_fingerprint": "fp",
            "model": "m",
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": f"a{index}"},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": 9,
                }
                for index in (0, 1)
            ],
            "usage": {
                "prompt_tokens": 0,
                "completion_tokens": 0,
                "total_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }

    def message(self, *events: Event) -> str:
        one = CollectedCompletion(token_ids=[1], finish_reason=FinishReason.stop)
        answer = CollectedAnswer(
            completion=one, message=message_of(*events), finish_reason="tool_calls"
        )
        response = asyncio.run(
            chat.to_response(
                HEAD,
                Generation(request_id="r", prompt_token_ids=[1], sampling=SamplingParams()),
                {0: answer},
                PIECES.__getitem__,
                options=PLAIN,
                usage=no_usage(),
            )
        )
        assert response.choices[0].finish_reason == "tool_calls"
        return encoded(response.choices[0].message)

    def test_calls_without_content(self):
        assert self.message(CallBegins(0, "f", "call_1"), CallArguments(0, "{}")) == (
            '{"role":"assistant","content":null,"tool_calls":[{"id":"call_1","type":"function",'
            '"function":{"name":"f","arguments":"{}"}}]}'
        )

    def test_reasoning_under_both_names(self):
        assert self.message(Reasoning("so"), Content("a")) == (
            '{"role":"assistant","content":"a","reasoning":"so","reasoning_content":"so"}'
        )
