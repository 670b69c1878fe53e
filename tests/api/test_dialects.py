"""Bodies to engine requests and news to chunks: pure functions, literal expectations."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ostinato.api import chat, completions, tokenization
from ostinato.api.answers import AnswerNews, CollectedAnswer
from ostinato.api.generation import (
    CollectedCompletion,
    Generation,
    ReplyHead,
    ReplyOptions,
    Tally,
    check_model,
    collect,
    new_id,
)
from ostinato.api.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    token_text,
)
from ostinato.api.parsing.events import (
    CallArguments,
    CallBegins,
    Content,
    Message,
    Reasoning,
    ToolCall,
)
from ostinato.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Usage,
    decode,
)
from ostinato.api.tools import template_messages
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    ServedModel,
    TokenLogprobs,
)

MODEL = ServedModel(
    name="m", max_model_len=20, vocab_size=100, eos_token_ids=(0,), tokenizer="", created=7
)
HEAD = ReplyHead(id="chatcmpl-1", created=7, model="m")
PLAIN = ReplyOptions()
PIECES = {1: b"a", 2: b" b", 3: b"\xf0\x9f", 4: b"\xa6\x86"}


def chat_body(**fields: object) -> ChatCompletionRequest:
    fields = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return decode(json.dumps(fields).encode(), ChatCompletionRequest)


def completion_body(**fields: object) -> CompletionRequest:
    return decode(json.dumps({"prompt": "Hi", **fields}).encode(), CompletionRequest)


def sampling_of_chat(
    *, model: ServedModel = MODEL, default_max_tokens: int | None = None, **fields: object
) -> SamplingParams:
    body = chat_body(**fields)
    chat.check(body)
    return chat.to_request(
        body, [1, 2, 3], model, request_id="r", default_max_tokens=default_max_tokens
    ).sampling


def output(text: str, token_ids: list[int], total: int, **fields: Any) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        index=fields.pop("index", 0),
        text_delta=text,
        new_token_ids=token_ids,
        num_output_tokens=total,
        **fields,
    )


def encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


class TestToRequest:
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

    def test_the_models_defaults_then_the_requests_values(self):
        model = msgspec.structs.replace(MODEL, default_sampling={"temperature": 0.6, "top_k": 20.0})
        assert sampling_of_chat(model=model, temperature=0) == SamplingParams(
            temperature=0, top_k=20, max_tokens=17
        )

    def test_the_servers_default_of_max_tokens_shrinks_to_the_room(self):
        assert sampling_of_chat(default_max_tokens=5).max_tokens == 5
        assert sampling_of_chat(default_max_tokens=500).max_tokens == 17
        assert sampling_of_chat(default_max_tokens=5, max_tokens=9).max_tokens == 9

    def test_the_newer_name_of_max_tokens(self):
        assert sampling_of_chat(max_completion_tokens=4).max_tokens == 4
        assert sampling_of_chat(max_completion_tokens=4, max_tokens=4).max_tokens == 4

    def test_priority_and_salt(self):
        body = chat_body(priority=-3, cache_salt="me")
        request = chat.to_request(body, [1], MODEL, request_id="r", default_max_tokens=None)
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
            ({"stop": ""}, "stop", "stop must be at most 16 non-empty strings, got ('',)"),
            (
                {"stop_token_ids": [100]},
                "stop_token_ids",
                "stop_token_ids names token id 100, the vocabulary of m is [0, 100)",
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
            chat.to_request(chat_body(), [1] * 20, MODEL, request_id="r", default_max_tokens=None)
        assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")

    def test_completions_name_their_own_fields(self):
        with pytest.raises(InvalidRequestError) as refused:
            completions.to_requests(
                completion_body(), [[1], [1] * 20], MODEL, request_id="r", default_max_tokens=None
            )
        assert refused.value.param == "prompt"

    def test_one_request_per_prompt(self):
        requests = completions.to_requests(
            completion_body(logprobs=2), [[1], [2]], MODEL, request_id="r", default_max_tokens=None
        )
        assert [(one.request_id, one.prompt_token_ids) for one in requests] == [
            ("r-0", [1]),
            ("r-1", [2]),
        ]
        assert {one.sampling.logprobs for one in requests} == {2}

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
        assert new_id("cmpl", completion_body(request_id="mine")) == "cmpl-mine"
        first, second = (new_id("cmpl", completion_body()) for _ in range(2))
        assert first.startswith("cmpl-")
        assert first != second


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
        with pytest.raises(InvalidRequestError, match="4096 sequences with n"):
            completions.prompts(completion_body(prompt=["a"] * 1024, n=4))


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
        assert chat.asks_for_answer(chat_body(**fields)) is expected


def parsed(news: RequestOutput) -> AnswerNews:
    """News of an answer that is nothing but content."""
    events = [Content(news.text_delta)] if news.text_delta else []
    return AnswerNews(news, events, news.finish_reason and news.finish_reason.value)


class TestChatChunks:
    def chunks(self, news: RequestOutput, options: ReplyOptions = PLAIN, **more: Any) -> list[str]:
        chunks = chat.to_chunks(HEAD, parsed(news), PIECES.__getitem__, options=options, **more)
        return [encoded(one) for one in chunks]

    START = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":'

    def test_the_first_news_brings_the_role(self):
        assert self.chunks(output("a", [1], 1)) == [
            self.START + '[{"index":0,"delta":{"role":"assistant","content":""},'
            '"logprobs":null,"finish_reason":null}]}',
            self.START + '[{"index":0,"delta":{"content":"a"},'
            '"logprobs":null,"finish_reason":null}]}',
        ]

    def test_held_back_text_makes_no_chunk(self):
        assert self.chunks(output("", [1], 2)) == []

    def test_the_end(self):
        news = output("", [1], 3, index=1, finish_reason=FinishReason.stop, stop_reason="END")
        assert self.chunks(news) == [
            self.START + '[{"index":1,"delta":{},"logprobs":null,"finish_reason":"stop",'
            '"stop_reason":"END"}]}'
        ]

    def test_the_end_with_text(self):
        news = output("a", [1], 3, finish_reason=FinishReason.length)
        assert self.chunks(news) == [
            self.START + '[{"index":0,"delta":{"content":"a"},"logprobs":null,'
            '"finish_reason":"length","stop_reason":null}]}'
        ]

    def test_logprobs_come_even_when_the_text_is_held_back(self):
        news = output("", [3], 2, logprobs=[TokenLogprobs(-0.5, 1, [3, 1], [-0.5, -1.0])])
        assert self.chunks(news, ReplyOptions(num_top_logprobs=1)) == [
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
            [chat.to_request(chat_body(), [1] * 4, MODEL, request_id="", default_max_tokens=1)]
        )
        tally.add(0, output("", [1], 1, num_cached_tokens=3))
        usage = (
            '"usage":{"prompt_tokens":4,"completion_tokens":1,"total_tokens":5,'
            '"prompt_tokens_details":{"cached_tokens":3}}}'
        )
        assert encoded(chat.usage_chunk(HEAD, tally.usage)) == self.START + "[]," + usage
        assert self.chunks(output("a", [1], 2), usage=tally.usage)[0].endswith("}]," + usage)
        assert self.chunks(output("a", [1], 2), usage=None)[0].endswith('}],"usage":null}')


class TestDeltas:
    def test_everything_in_one_piece_of_news(self):
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


class TestReplyMessages:
    def message(self, **fields: Any) -> str:
        one = CollectedCompletion(text="", token_ids=[1], finish_reason=FinishReason.stop)
        answer = CollectedAnswer(
            completion=one, message=Message(**fields), finish_reason="tool_calls"
        )
        response = chat.to_response(
            HEAD,
            Generation(request_id="r", prompt_token_ids=[1], sampling=SamplingParams()),
            {0: answer},
            PIECES.__getitem__,
            options=PLAIN,
            usage=usage(),
        )
        assert response.choices[0].finish_reason == "tool_calls"
        return encoded(response.choices[0].message)

    def test_calls_without_content(self):
        assert self.message(calls=[ToolCall(name="f", arguments="{}", id="call_1")]) == (
            '{"role":"assistant","content":null,"tool_calls":[{"id":"call_1","type":"function",'
            '"function":{"name":"f","arguments":"{}"}}]}'
        )

    def test_reasoning_under_both_names(self):
        assert self.message(content="a", reasoning="so") == (
            '{"role":"assistant","content":"a","reasoning":"so","reasoning_content":"so"}'
        )


class TestTally:
    def test_prompts_count_once_and_completions_all(self):
        requests = completions.to_requests(
            completion_body(n=2), [[1, 1], [1, 1, 1]], MODEL, request_id="", default_max_tokens=4
        )
        tally = Tally.of(requests)
        for prompt_index, index, cached in ((0, 0, 1), (0, 1, 2), (1, 0, 2), (1, 1, 3)):
            news = output("", [1, 2], 2, index=index, num_cached_tokens=cached)
            tally.add(prompt_index, news)
        assert msgspec.to_builtins(tally.usage) == {
            "prompt_tokens": 5,
            "completion_tokens": 8,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 3},
        }


def usage() -> Usage:
    return Tally(0).usage


class TestResponses:
    def collected(self) -> dict[tuple[int, int], CollectedCompletion]:
        completions_by_key: dict[tuple[int, int], CollectedCompletion] = {}
        entry = TokenLogprobs(-0.5, 1, [1], [-0.5])
        for index in (1, 0):
            collect(completions_by_key, 0, output("a", [1], 1, index=index, logprobs=[entry]))
            collect(
                completions_by_key,
                0,
                output(
                    f"{index}",
                    [2],
                    2,
                    index=index,
                    logprobs=[entry],
                    finish_reason=FinishReason.stop,
                    stop_reason=9,
                ),
            )
        return completions_by_key

    def test_chat(self):
        response = chat.to_response(
            HEAD,
            Generation(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(n=2)),
            {
                index: CollectedAnswer(
                    completion=one, message=Message(content=one.text), finish_reason="stop"
                )
                for (_, index), one in self.collected().items()
            },
            PIECES.__getitem__,
            options=PLAIN,
            usage=usage(),
        )
        assert msgspec.to_builtins(response) == {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 7,
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

    def test_completions_number_choices_over_all_prompts(self):
        collected = self.collected()
        collected[(1, 0)] = collected[(0, 0)]
        response = completions.to_response(
            HEAD,
            [Generation(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(n=2))] * 2,
            collected,
            PIECES.__getitem__,
            options=ReplyOptions(num_top_logprobs=0),
            usage=usage(),
        )
        assert [(choice.index, choice.text) for choice in response.choices] == [
            (0, "a0"),
            (1, "a1"),
            (2, "a0"),
        ]
        assert msgspec.to_builtins(response.choices[0].logprobs) == {
            "tokens": ["a", " b"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"a": -0.5}, {" b": -0.5}],
            "text_offset": [0, 1],
        }


class TestCompletionChunks:
    def test_text(self):
        chunk = completions.to_chunk(
            HEAD, 3, output("a", [1], 1), PIECES.__getitem__, options=PLAIN
        )
        assert encoded(chunk) == (
            '{"id":"chatcmpl-1","object":"text_completion","created":7,"model":"m",'
            '"choices":[{"index":3,"text":"a","logprobs":null,"finish_reason":null}]}'
        )

    def test_held_back(self):
        news = output("", [1], 1)
        assert completions.to_chunk(HEAD, 0, news, PIECES.__getitem__, options=PLAIN) is None

    def test_offsets_go_on_from_chunk_to_chunk(self):
        offsets = completions.TextOffsets(PIECES.__getitem__)
        assert [offsets.advance(0, [1, 2]), offsets.advance(1, [2]), offsets.advance(0, [1])] == [
            0,
            0,
            3,
        ]


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
        assert logprobs.top_logprobs == [{"a": -0.5, " b": -1.0, "bytes:\\xa6\\x86": -3.0}]
        assert logprobs.text_offset == [5]

    def test_tokens_as_ids(self):
        entry = TokenLogprobs(-0.5, 1, [4, 1], [-0.5, -1.0])
        logprobs = completion_logprobs(
            [4], [entry], PIECES.__getitem__, num_top=2, text_offset=0, as_ids=True
        )
        assert logprobs.tokens == ["token_id:4"]
        assert logprobs.top_logprobs == [{"token_id:4": -0.5, "token_id:1": -1.0}]
        (content,) = chat_logprobs([4], [entry], PIECES.__getitem__, num_top=1, as_ids=True).content
        assert (content.token, content.bytes) == ("token_id:4", [0xA6, 0x86])
        assert content.top_logprobs[0].token == "token_id:4"

    def test_nothing_comes_before_the_first_token(self):
        entry = TokenLogprobs(-0.5, 2, [1], [-0.1])
        logprobs = completion_logprobs(
            [1, 2], [None, entry], PIECES.__getitem__, num_top=1, text_offset=0
        )
        assert msgspec.to_builtins(logprobs) == {
            "tokens": ["a", " b"],
            "token_logprobs": [None, -0.5],
            "top_logprobs": [None, {"a": -0.1, " b": -0.5}],
            "text_offset": [0, 1],
        }
        scores = prompt_logprobs([1, 2], [entry], PIECES.__getitem__, num_top=1)
        assert msgspec.to_builtins(scores) == [
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
    def test_not_both_and_not_neither(self, fields):
        body = decode(json.dumps(fields).encode(), TokenizeRequest)
        with pytest.raises(InvalidRequestError, match="either prompt or messages"):
            tokenization.check(body)

    def test_ids_outside_of_the_vocabulary(self, tokenizer):
        with pytest.raises(InvalidRequestError, match=r"tokens has id 100, .* \[0, 100\)"):
            tokenization.to_text(DetokenizeRequest(tokens=[1, 100]), tokenizer, MODEL)
