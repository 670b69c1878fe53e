"""Images in the bodies of all dialects, up to the request that the engine gets."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.api.anthropic.preparation import prepare_messages, prepare_token_count
from ostinato.api.openai.preparation import prepare_chat_completion, prepare_tokenization
from ostinato.api.preparation.generation import Generation, num_media_bytes
from ostinato.api.preparation.preparation import (
    Arrival,
    FetchNeededError,
    ForkNeededError,
    Grant,
    Preparation,
    PreparationSettings,
)
from ostinato.api.responses.preparation import prepare_input_tokens, prepare_response
from ostinato.api.schemas.conversation import Message
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.models.vision.image_spec import ImageSizing
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.prompt_media import FetchWanted
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.api.media.image_apps import (
    IMAGES_FIRST_TEMPLATE,
    PARTS_TEMPLATE,
    PLACEHOLDER,
    TEXT_TEMPLATE,
    Source,
    data_url,
    image_part,
    image_spec,
    png,
    save_model,
    served,
    text_part,
)

URL = "https://images.test/a.png"


class Model:
    """Prepares requests for a model that takes images."""

    def __init__(self, directory: Path, template: str) -> None:
        directory.mkdir()
        self.directory = directory
        self.placeholder_id = save_model(directory, template)
        self.tokenizer = Tokenizer.from_path(directory)

    def preparation(
        self,
        *,
        granted: Grant = Grant.images,
        spec: Any = "default",
        model: dict[str, Any] | None = None,
        **images: Any,
    ) -> Preparation:
        spec = image_spec(self.placeholder_id) if spec == "default" else spec
        return Preparation(
            Source(served(self.directory, spec, **(model or {})), self.tokenizer),
            PreparationSettings(images=ImagesConfig(**images)),
            granted=granted,
        )

    def chat(
        self,
        content: Any,
        *,
        fetched: dict[str, bytes] | None = None,
        fields: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Generation:
        messages = content if is_conversation(content) else [user(content)]
        body = json.dumps({"messages": messages, **(fields or {})}).encode()
        arrival = Arrival(fetched=fetched or {})
        return prepare_chat_completion(self.preparation(**settings), body, arrival).ready.generation

    def text(self, generation: Generation) -> str:
        """The prompt with one placeholder for each image."""
        ids = list(generation.prompt_token_ids)
        for image in reversed(generation.images):
            assert ids[image.begin : image.end] == [self.placeholder_id] * image.num_tokens
            del ids[image.begin + 1 : image.end]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def is_conversation(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and "role" in content[0]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("parts") / "model", PARTS_TEMPLATE)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("text") / "model", TEXT_TEMPLATE)


@pytest.fixture(scope="module")
def first_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("first") / "model", IMAGES_FIRST_TEMPLATE)


def refusal(function: Any, *arguments: Any, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        function(*arguments, **fields)
    assert refused.value.status == 400
    return refused.value


class TestOrder:
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.lists(
                st.one_of(st.sampled_from(["red", "a b", " "]), st.integers(1, 5)),
                min_size=1,
                max_size=4,
            ),
            min_size=1,
            max_size=3,
        )
    )
    def test_parts_and_images_keep_their_order(self, model: Model, conversation):
        """A number stands for an image of this width, in units of one embedding."""
        messages = [
            user(
                [
                    text_part(one) if isinstance(one, str) else image_part(png(4 * one, 4))
                    for one in parts
                ]
            )
            for parts in conversation
        ]
        generation = model.chat(messages, fields={"max_tokens": 1})
        widths = [one for parts in conversation for one in parts if not isinstance(one, str)]
        assert [image.num_tokens for image in generation.images] == widths
        assert [len(image.pixels) for image in generation.images] == [4 * 4 * 3 * w for w in widths]
        # Images of one width are equal.
        assert num_media_bytes([generation] * 2) == sum(4 * 4 * 3 * w for w in set(widths))
        shown = ""
        for parts in conversation:
            is_text = all(isinstance(one, str) for one in parts)
            texts = [one if isinstance(one, str) else f"[{PLACEHOLDER}]" for one in parts]
            shown += f"<|begin|>user\n{(chr(10) if is_text else '').join(texts)}<|end|>"
        assert model.text(generation) == shown + "<|begin|>assistant\n"

    def test_a_template_without_images_gets_the_marked_placeholder(self, text_model: Model):
        content = [text_part("a"), image_part(png(8, 8)), text_part("b")]
        generation = text_model.chat(content)
        assert text_model.text(generation) == f"<|begin|>user\na\n[{PLACEHOLDER}]\nb<|end|>"
        assert [image.num_tokens for image in generation.images] == [4]

    def test_a_template_that_reads_parts_only(self, first_model: Model):
        messages = [
            {"role": "system", "content": "s"},
            user([text_part("a"), image_part(png(4, 4)), text_part("b"), image_part(png(8, 4))]),
        ]
        generation = first_model.chat(messages)
        two = f"{PLACEHOLDER}\n" * 2
        assert first_model.text(generation) == f"system: s user: {two}a b "
        assert [image.num_tokens for image in generation.images] == [1, 2]

    def test_results_of_tools(self, model: Model):
        """The template does not know tools, so results become messages of the user."""
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [
            user("hi"),
            {"role": "assistant", "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": [text_part("x"), image_part(png(4, 4))],
            },
        ]
        generation = model.chat(messages)
        shown = f"<|begin|>user\nResult of look: x[{PLACEHOLDER}]<|end|>"
        assert shown in model.text(generation)

    def test_the_clients_own_template_chooses_the_form(self, text_model: Model):
        fields = {"chat_template": PARTS_TEMPLATE, "add_generation_prompt": False}
        generation = text_model.chat([image_part(png(4, 4)), text_part("b")], fields=fields)
        assert text_model.text(generation) == f"<|begin|>user\n[{PLACEHOLDER}]b<|end|>"


class TestDialects:
    content = (text_part("a"), image_part(png(8, 4)), text_part("b"))

    def test_all_forms_of_a_part_are_one_request(self, model: Model):
        expected = model.chat(list(self.content))
        url = data_url(png(8, 4))
        for part in (
            {"type": "image_url", "image_url": url},
            {"type": "image_url", "image_url": {"url": url, "detail": "high"}, "uuid": "mine"},
            {
                "type": "image_url",
                "image_url": {"url": url},
                "cache_control": {"type": "ephemeral"},
            },
            {"type": "input_image", "image_url": url, "detail": "auto"},
            {"type": "input_image", "image_url": {"url": url}},
        ):
            found = model.chat([self.content[0], part, self.content[2]])
            assert found.images == expected.images
            assert found.prompt_token_ids == expected.prompt_token_ids

    def test_responses(self, model: Model):
        expected = model.chat(list(self.content))
        parts = [
            {"type": "input_text", "text": "a"},
            {"type": "input_image", "image_url": data_url(png(8, 4)), "detail": "auto"},
            {"type": "input_text", "text": "b"},
        ]
        body = json.dumps({"input": [user(parts)]}).encode()
        arrival = Arrival(request_id="resp_1")
        prepared = prepare_response(model.preparation(), body, arrival)
        assert prepared.ready.generation.images == expected.images
        assert prepared.ready.generation.prompt_token_ids == expected.prompt_token_ids
        count = msgspec.json.decode(prepare_input_tokens(model.preparation(), body, arrival))
        assert count["input_tokens"] == len(expected.prompt_token_ids)
        # The stored conversation continues with its image.
        stored = msgspec.json.decode(prepared.messages, type=list[Message])
        assert [len(message.media) for message in stored] == [1]
        more = json.dumps({"input": "c", "previous_response_id": "resp_1"}).encode()
        arrival = Arrival(request_id="resp_2", stored_messages=prepared.messages)
        again = prepare_response(model.preparation(), more, arrival).ready.generation
        assert again.images == expected.images

    def test_responses_of_tools(self, model: Model):
        items = [
            user("hi"),
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": data_url(png(4, 4))}],
            },
        ]
        body = json.dumps({"input": items}).encode()
        prepared = prepare_response(model.preparation(), body, Arrival(request_id="r"))
        assert f"Result of look: [{PLACEHOLDER}]" in model.text(prepared.ready.generation)

    def test_anthropic(self, model: Model):
        expected = model.chat(list(self.content))
        data = base64.b64encode(png(8, 4)).decode()
        source = {"type": "base64", "media_type": "image/jpeg", "data": data}  # it is a PNG
        blocks = [text_part("a"), {"type": "image", "source": source}, text_part("b")]
        body = {"messages": [user(blocks)], "max_tokens": 9}
        prepared = prepare_messages(model.preparation(), json.dumps(body).encode(), Arrival())
        assert prepared.ready.generation.images == expected.images
        assert prepared.ready.generation.prompt_token_ids == expected.prompt_token_ids
        del body["max_tokens"]
        counted = prepare_token_count(model.preparation(), json.dumps(body).encode(), Arrival())
        assert msgspec.json.decode(counted)["input_tokens"] == len(expected.prompt_token_ids)

    def test_anthropic_results_of_tools(self, model: Model):
        data = base64.b64encode(png(4, 4)).decode()
        image = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data},
        }
        blocks = [
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "is_error": True,
                "content": [image, text_part("x")],
            },
            image,
        ]
        use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        messages = [user("hi"), {"role": "assistant", "content": [use]}, user(blocks)]
        body = json.dumps({"messages": messages, "max_tokens": 9}).encode()
        generation = prepare_messages(model.preparation(), body, Arrival()).ready.generation
        assert f"Result of look: Error:[{PLACEHOLDER}]x" in model.text(generation)
        assert len(generation.images) == 2

    def test_tokenize(self, model: Model):
        expected = model.chat(list(self.content))
        body = json.dumps({"messages": [user(list(self.content))]}).encode()
        answer = msgspec.json.decode(prepare_tokenization(model.preparation(), body, Arrival()))
        assert answer["tokens"] == expected.prompt_token_ids
        assert answer["count"] == len(answer["tokens"])

    def test_counts_may_exceed_the_context(self, model: Model):
        body = json.dumps({"messages": [user([image_part(png(32, 32))])]}).encode()
        small = {"max_model_len": 40}
        answer = prepare_tokenization(model.preparation(model=small), body, Arrival())
        assert msgspec.json.decode(answer)["count"] > 64
        error = refusal(model.chat, [image_part(png(32, 32))], model=small)
        assert (error.param, error.code) == ("messages", "context_length_exceeded")


class TestDetail:
    def test_low_is_at_most_512_x_512(self, model: Model):
        spec = image_spec(model.placeholder_id, max_pixels=1 << 24, patch_size=16)
        room = {"media_cache_tokens": 5000, "max_model_len": 5000}
        whole = model.chat([image_part(png(1024, 1024))], spec=spec, model=room)
        low = model.chat([image_part(png(1024, 1024), detail="low")], spec=spec, model=room)
        (large,), (small,) = whole.images, low.images
        assert large.height * large.width == 1024 * 1024
        assert small.height * small.width == 512 * 512

    @pytest.mark.parametrize(("edge", "is_served"), [(336, True), (560, False)])
    def test_low_for_a_model_of_fixed_sizing(self, model: Model, edge: int, is_served: bool):
        spec = image_spec(
            model.placeholder_id, sizing=ImageSizing.fixed, size=(edge, edge), num_tokens=5
        )
        part = image_part(png(4, 4), detail="low")
        if is_served:
            assert (
                model.chat([part], spec=spec).images
                == model.chat([image_part(png(4, 4))], spec=spec).images
            )
        else:
            error = refusal(model.chat, [part], spec=spec)
            assert error.code == "unsupported_parameter"
            assert "image 1: detail 'low' means at most 262144 pixels" in str(error)


class TestRefused:
    def test_a_model_that_takes_no_images(self, model: Model):
        error = refusal(model.chat, [image_part(png(4, 4))], spec=None, granted=Grant.text)
        assert (error.param, error.code) == ("messages", "unsupported_parameter")
        assert "vision takes no images" in str(error)

    @pytest.mark.parametrize("role", ["system", "developer", "assistant"])
    def test_roles_without_images(self, model: Model, role: str):
        messages = [{"role": role, "content": [image_part(png(4, 4))]}, user("b")]
        error = refusal(model.chat, messages)
        assert error.param == "messages[0].content"
        assert f"the role '{role}' has text only" in str(error)

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"no image",
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            png(9, 9)[:45],
            b"%PDF-1.7",
        ],
    )
    def test_bytes_that_are_no_image(self, model: Model, data: bytes):
        error = refusal(model.chat, [image_part(png(4, 4)), image_part(data)])
        assert (error.param, error.code) == ("messages", "invalid_image")
        assert "image 2" in str(error)

    @pytest.mark.parametrize(
        ("url", "text"),
        [
            ("data:image/png,abc", "image 1 is a data URL without ';base64,'"),
            ("data:image/png;base64,AAA", "image 1 is not valid base64"),
            ("data:image/png;base64,!!!!", "image 1 is not valid base64"),
        ],
    )
    def test_data_urls(self, model: Model, url: str, text: str):
        part = {"type": "image_url", "image_url": {"url": url}}
        error = refusal(model.chat, [part])
        assert (error.param, error.code) == ("messages", "invalid_image_url")
        assert text in str(error)

    def test_limits(self, model: Model):
        parts = [image_part(png(32, 32))] * 3
        error = refusal(model.chat, parts, max_per_request=2, granted=Grant.text)
        assert error.code == "too_many_images"
        assert "3 images, and images.max_per_request allows 2" in str(error)
        error = refusal(model.chat, parts, max_mib=0.00005)
        assert "images.max_mib allows 52" in str(error)
        error = refusal(model.chat, parts, max_pixels=1000)
        assert "image 1" in str(error)
        error = refusal(model.chat, parts, model={"media_cache_tokens": 130})
        assert "the first 3 images have 192 embeddings, and a request can have 130" in str(error)
        assert len(model.chat(parts, model={"media_cache_tokens": 192}).images) == 3

    @pytest.mark.parametrize(
        "text", [PLACEHOLDER, f"{PLACEHOLDER}{PLACEHOLDER}", f"see {PLACEHOLDER} here"]
    )
    def test_the_placeholder_in_a_text(self, model: Model, text: str):
        for content in ([text_part(text), image_part(png(4, 4))], text):
            assert refusal(model.chat, content).param == "messages"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("truncate_prompt_tokens", 5),
            ("truncate_prompt_tokens", -1),
            ("prompt_logprobs", 0),
            ("return_token_offsets", True),
        ],
    )
    def test_fields_that_need_text(self, model: Model, name: str, value: Any):
        error = refusal(model.chat, [image_part(png(4, 4))], fields={name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        model.chat("text only", fields={name: value})

    def test_echo(self, model: Model):
        messages = [user([image_part(png(4, 4))]), {"role": "assistant", "content": "a"}]
        fields = {"echo": True, "continue_final_message": True}
        assert refusal(model.chat, messages, fields=fields).param == "echo"

    def test_truncation_of_responses(self, model: Model):
        part = {"type": "input_image", "image_url": data_url(png(4, 4))}
        body = json.dumps({"input": [user([part])], "truncation": "auto"}).encode()
        arrival = Arrival(request_id="r")
        error = refusal(prepare_response, model.preparation(), body, arrival)
        assert error.param == "truncation"
        body = json.dumps({"input": [user([{**part, "image_url": "data:,"}])]}).encode()
        error = refusal(prepare_response, model.preparation(), body, arrival)
        assert error.param == "input"
        assert str(error).startswith("input: image 1 ")


class TestWhereItRuns:
    def test_images_are_decoded_in_a_fork_of_their_own_only(self, model: Model):
        with pytest.raises(ForkNeededError):
            model.chat([image_part(png(1, 1))], granted=Grant.text)
        assert model.chat("text", granted=Grant.text).images == []

    def test_urls_must_be_fetched_first(self, model: Model):
        parts = [{"type": "image_url", "image_url": url} for url in (URL, data_url(png(4, 4)), URL)]
        for granted in (Grant.text, Grant.images):
            with pytest.raises(FetchNeededError) as needed:
                model.chat(parts, domains=["images.test"], granted=granted)
            assert needed.value.wanted == {URL: FetchWanted("messages: image 1", MediaKind.image)}
        generation = model.chat(parts, domains=["images.test"], fetched={URL: png(8, 4)})
        assert [image.num_tokens for image in generation.images] == [2, 1, 2]

    @pytest.mark.parametrize("url", ["http://169.254.169.254/x", URL, "ftp://images.test/"])
    def test_a_url_whose_host_is_not_allowed(self, model: Model, url: str):
        part = {"type": "image_url", "image_url": url}
        error = refusal(model.chat, [part], granted=Grant.text)
        assert (error.param, error.code) == ("messages", "invalid_image_url")
