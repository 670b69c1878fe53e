"""Request bodies: accepted ones, and the error messages for refused ones."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.api.base.unsupported_fields import UNSUPPORTED, UNSUPPORTED_IN_MESSAGES
from ostinato.api.chat.tools import template_messages
from ostinato.api.schemas.body_decoding import decode
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.conversation import Message, TextPart
from ostinato.api.schemas.text_completions import CompletionRequest
from ostinato.api.schemas.tokenize import TokenizeRequest
from ostinato.runtime.errors import InvalidRequestError
from tests.api.dialect_values import chat_body

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: object) -> ChatCompletionRequest:
    return decode(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatCompletionRequest)


def refusal(body: bytes | dict, schema: type = ChatCompletionRequest) -> InvalidRequestError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidRequestError) as refused:
        decode(data, schema)
    assert refused.value.status == 400
    return refused.value


class TestAccepted:
    def test_text_and_parts(self):
        body = decode(
            b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
            ChatCompletionRequest,
        )
        assert body.messages == [Message(role="user", content=[TextPart("a")])]

    @pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key"])
    def test_labels(self, name):
        assert getattr(chat(**{name: "somebody"}), name) == "somebody"

    def test_null_is_absent(self):
        assert chat(temperature=None, n=None, stop=None, echo=None, cache_salt=None) == chat()

    @pytest.mark.parametrize(
        "prompt", ["a", ["a", "b"], [1, 2], [[1, 2], [3]]], ids=["text", "texts", "ids", "lists"]
    )
    def test_all_kinds_of_prompt(self, prompt):
        assert decode(json.dumps({"prompt": prompt}).encode(), CompletionRequest).prompt == prompt

    @pytest.mark.parametrize("name", sorted(UNSUPPORTED))
    def test_unsupported_fields_that_ask_for_nothing(self, name):
        for value in (None, *UNSUPPORTED[name].no_op_values):
            assert chat(**{name: value}) == chat()

    def test_the_nulls_that_an_sdk_keeps_in_a_message(self):
        message = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None}
        assert chat(messages=[message]) == chat(messages=[{"role": "assistant", "content": "Hi"}])


MESSAGE_KEYS = {*Message.__struct_fields__, *UNSUPPORTED_IN_MESSAGES}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b'{"messages": }', b"{}x", b'{"messages": "\\ud800"}', b"\xff\xfe", b"\x00"],
    )
    def test_not_json(self, body):
        error = refusal(body)
        assert (error.code, error.param) == ("invalid_json", None)

    def test_not_utf8_within_a_string(self):
        error = refusal(b'{"messages": [{"role": "user", "content": "\xff"}]}')
        assert error.code == "invalid_json"

    @pytest.mark.parametrize("body", [b"[]", b"null", b'"a"', b"1"])
    def test_not_an_object(self, body):
        assert str(refusal(body)).startswith("the body: Expected `object`")

    def test_a_deep_pit_of_brackets(self):
        error = refusal(b'{"chat_template_kwargs": {"a":' + b"[" * 100_000)
        assert error.code == "invalid_json"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": "1"}, "temperature"),
            ({"n": 1.5}, "n"),
            ({"stream": "yes"}, "stream"),
            ({"stop": [1]}, "stop[0]"),
            ({"logit_bias": {"a": 1}}, "logit_bias"),
            ({"logit_bias": {"1": "a"}}, "logit_bias"),
            ({"messages": "Hi"}, "messages"),
            ({"messages": []}, "messages"),
            ({"messages": ["Hi"]}, "messages[0]"),
            ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
            ({"messages": [{"role": "r" * 65, "content": "a"}]}, "messages[0].role"),
            (
                {"messages": [{"role": "user", "content": "a", "template_fields": 1}]},
                "messages[0].template_fields",
            ),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"service_tier": "gold"}, "service_tier"),
            ({"safety_identifier": "s" * 129}, "safety_identifier"),
            ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
            ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
            ({"priority": 1 << 40}, "priority"),
            ({"top_k": 10**30}, "top_k"),
            ({"request_id": "a b"}, "request_id"),
            ({"request_id": ""}, "request_id"),
            ({"cache_salt": "a" * 257}, "cache_salt"),
            ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ],
    )
    def test_a_wrong_value_names_its_field(self, fields, param):
        error = refusal({"messages": MESSAGES, **fields})
        assert error.param == param
        assert str(error).startswith(param)

    def test_a_missing_field(self):
        error = refusal({"model": "x"})
        assert (str(error), error.param, error.code) == (
            "messages is required",
            "messages",
            "missing_field",
        )

    def test_an_unknown_field_with_the_nearest_known_one(self):
        error = refusal({"messages": MESSAGES, "temprature": 1})
        assert str(error) == (
            "temprature is not a field of this endpoint; did you mean temperature?"
        )
        assert (error.param, error.code) == ("temprature", "unknown_parameter")

    def test_an_unknown_key_of_a_message_is_for_the_template(self):
        message = {"role": "user", "content": "a", "colour": 1, "shade": None, "refusal": None}
        (one,) = chat_body(messages=[message]).messages
        assert one == Message(role="user", content="a", template_fields={"colour": 1})

    @given(
        role=st.text(min_size=1, max_size=64),
        others=st.dictionaries(
            st.text(max_size=6).filter(lambda key: key not in MESSAGE_KEYS), JSON, max_size=4
        ),
    )
    def test_the_template_sees_each_key_of_a_message(self, role, others):
        """The role is any text, and the keys are not fields of `Message`. Null drops a key."""
        given_message = {"role": role, "content": "Hi", **others}
        body = msgspec.json.encode({"messages": [given_message]})
        (message,) = decode(body, ChatCompletionRequest).messages
        (shown,) = template_messages([message])
        seen = {key: value for key, value in others.items() if value is not None}
        assert shown == {"role": role, "content": "Hi", **seen}

    def test_an_unknown_key_within_a_part_of_a_message(self):
        call = {"id": "a", "function": {"name": "f", "arguments": "{}", "colour": 1}}
        error = refusal({"messages": [{"role": "assistant", "tool_calls": [call]}]})
        assert error.param == "messages[0].tool_calls[0].function.colour"

    @pytest.mark.parametrize("name", ["audio", "function_call"])
    def test_a_key_of_a_message_that_is_refused_by_name(self, name):
        error = refusal({"messages": [{"role": "user", "content": "a", "x": 1, name: {"a": 1}}]})
        assert (error.param, error.code) == (f"messages[0].{name}", "unsupported_parameter")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("audio", {"voice": "x"}),
            ("moderation", {"model": "a"}),
            ("vllm_xargs", {"a": 5}),
            ("return_mm_kwargs", 0),  # 0 is not the value false
        ],
    )
    def test_what_is_known_and_not_there_yet(self, name, value):
        error = refusal({"messages": MESSAGES, name: value})
        assert str(error) == (
            f"{name} is not supported: it needs {UNSUPPORTED[name].missing_feature}, which this server does "
            "not have yet; leave it out"
        )
        assert (error.param, error.code) == (name, "unsupported_parameter")

    @pytest.mark.parametrize(
        ("name", "value", "instead"),
        [
            ("functions", [{"name": "f"}], "tools"),
            ("function_call", "auto", "tool_choice (in a message: tool_calls)"),
        ],
    )
    def test_an_older_name_leads_to_the_newer_one(self, name, value, instead):
        error = refusal({"messages": MESSAGES, name: value})
        assert str(error) == f"{name} is not supported: give {instead} instead"

    @pytest.mark.parametrize("name", ["suffix", "prompt_embeds"])
    def test_the_same_for_completions(self, name):
        value = {"suffix": "a", "prompt_embeds": "AAAA"}[name]
        error = refusal({"prompt": "a", name: value}, CompletionRequest)
        assert (error.param, error.code) == (name, "unsupported_parameter")

    @pytest.mark.parametrize("kind", ["video", "audio", "input_video", "file"])
    def test_content_that_is_no_known_part(self, kind):
        part = {"type": kind, kind: {"url": "data:"}}
        error = refusal({"messages": [{"role": "user", "content": [part]}]})
        assert error.param == "messages[0].content[0].type"
        assert f"Invalid value '{kind}'; parts are {{'type': 'text'" in str(error)
        assert "a video (docs/video.md) or audio (docs/audio.md)" in str(error)

    @pytest.mark.parametrize(
        ("part", "param", "code"),
        [
            ({"type": "image_url"}, "image_url", "missing_field"),
            ({"type": "image_url", "image_url": {}}, "image_url.url", "missing_field"),
            ({"type": "image_url", "image_url": "data:", "size": 1}, "size", "unknown_parameter"),
            (
                {"type": "image_url", "image_url": {"url": "data:", "detail": "huge"}},
                "image_url.detail",
                "invalid_value",
            ),
            ({"type": "input_image", "file_id": "f"}, "file_id", "unsupported_parameter"),
            ({"type": "input_audio"}, "input_audio", "missing_field"),
            ({"type": "input_audio", "input_audio": {}}, "input_audio.data", "missing_field"),
            ({"type": "audio_url", "audio_url": {}}, "audio_url.url", "missing_field"),
            ({"type": "video_url"}, "video_url", "missing_field"),
            ({"type": "video_url", "video_url": {}}, "video_url.url", "missing_field"),
            ({"type": "video_url", "video_url": 5}, "video_url", "invalid_value"),
            (
                {"type": "video_url", "video_url": {"url": "data:", "detail": "low"}},
                "video_url.detail",
                "unknown_parameter",
            ),
        ],
    )
    def test_parts_of_images_and_videos(self, part, param, code):
        error = refusal({"messages": [{"role": "user", "content": [part]}]})
        assert (error.param, error.code) == (f"messages[0].content[0].{param}", code)

    @pytest.mark.parametrize("schema", [ChatCompletionRequest, TokenizeRequest])
    @pytest.mark.parametrize(
        ("settings", "param", "code", "text"),
        [
            ({"video": {"num_frames": 0}}, "video.num_frames", "invalid_value", ">= 1"),
            ({"video": {"num_frames": -1}}, "video.num_frames", "invalid_value", ">= 1"),
            ({"video": {"num_frames": 1 << 31}}, "video.num_frames", "invalid_value", "<= 21474"),
            ({"video": {"num_frames": 10**30}}, "video.num_frames", "invalid_value", ""),
            ({"video": {"num_frames": 2.5}}, "video.num_frames", "invalid_value", "int"),
            ({"video": {"fps": 0}}, "video.fps", "invalid_value", "> 0"),
            ({"video": {"fps": "2"}}, "video.fps", "invalid_value", "float"),
            ({"video": {"frame_recovery": True}}, "video.frame_recovery", "unknown_parameter", ""),
            ({"image": {"mode": "RGB"}}, "image", "unknown_parameter", "leave it out"),
            ({"video": 3}, "video", "invalid_value", "object"),
        ],
    )
    def test_frames_that_a_request_asks_for(self, schema, settings, param, code, text):
        error = refusal({"messages": MESSAGES, "media_io_kwargs": settings}, schema)
        assert (error.param, error.code) == (f"media_io_kwargs.{param}", code)
        assert text in str(error)

    @pytest.mark.parametrize("value", [{}, {"sampling_rate": 8000}])
    def test_settings_for_reading_audio(self, value):
        error = refusal({"messages": MESSAGES, "media_io_kwargs": {"audio": value}})
        assert str(error) == (
            "media_io_kwargs.audio is not supported: it needs settings for reading audio, which "
            "this server does not have yet; leave it out"
        )
        assert (error.param, error.code) == ("media_io_kwargs.audio", "unsupported_parameter")

    def test_frames_that_no_request_asks_for(self):
        for value in (None, {}, {"video": {}}, {"video": {"fps": 1}}, {"video": {"num_frames": 9}}):
            body = json.dumps({"messages": MESSAGES, "media_io_kwargs": value}).encode()
            assert decode(body, ChatCompletionRequest).messages


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_no_depth_of_a_body_is_an_error_of_the_server(brackets: str) -> None:
    """The decoder's limit depends on the depth of Python's stack, so all depths around it run."""
    begin, end = ('{"a":', "}") if brackets == "{}" else ("[", "]")
    outcomes = set()
    for depth in range(700, 1050):
        value = begin * depth + "1" + end * depth
        body = f'{{"messages":[{{"role":"user","content":"x","foo":{value}}}]}}'
        try:
            template_messages(decode(body.encode(), ChatCompletionRequest).messages)
            outcomes.add("read")
        except InvalidRequestError as error:
            outcomes.add(error.code)
    assert outcomes == {"read", "invalid_json"}


def test_an_empty_body_is_named_as_such() -> None:
    assert str(refusal(b" ")) == "the body cannot be read as JSON in UTF-8: it is empty"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"truncation_side": "mid"},
            'truncation_side: Invalid enum value \'mid\'; allowed: "left", "right"',
        ),
        (
            {"early_stopping": "x"},
            "early_stopping: Invalid enum value 'x'; allowed: true, false, \"never\"",
        ),
        (
            {"tools": [{"type": "foo"}]},
            'tools[0].type: Invalid value \'foo\'; allowed: "function", "custom"',
        ),
        ({"top_k": 10**12}, "top_k=1000000000000: Expected `int` <= 2147483647"),
        (
            {"stream_options": {"include_usage": "a"}},
            "stream_options.include_usage='a': Expected `bool`, got `str`",
        ),
        ({"stop": ["a", 1]}, "stop[1]=1: Expected `str`, got `int`"),
        (
            {"logit_bias": {"5": 1, "abc": 1}},
            "logit_bias: its keys must be whole numbers as text, got 'abc'",
        ),
        ({"messages": []}, "messages=[]: Expected `array` of length >= 1"),
    ],
)
def test_a_refusal_names_the_value_and_what_is_allowed(fields: dict, message: str) -> None:
    assert str(refusal({"messages": MESSAGES, **fields})) == message
