"""Images in the prompts of `LLM` and `AsyncEngine`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.prompt_media import MediaLimits
from ostinato.runtime.text.encoded_prompts import (
    EncodedPrompt,
    PromptInputs,
    check_sampling_with_media,
)
from ostinato.runtime.text.offline_prompts import prompt_list
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.params import SamplingParams
from tests.api.media.image_apps import (
    PARTS_TEMPLATE,
    PLACEHOLDER,
    data_url,
    image_spec,
    png,
    save_model,
    served,
    text_part,
)


class Model:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.placeholder_id = save_model(directory, PARTS_TEMPLATE)
        self.tokenizer = Tokenizer.from_path(directory)

    def inputs(self, *, takes_images: bool = True, **config: Any) -> PromptInputs:
        spec = image_spec(self.placeholder_id) if takes_images else None
        return PromptInputs(
            served(self.directory, spec),
            self.tokenizer,
            MediaLimits(ImagesConfig(**config), VideoConfig(), AudioConfig()),
        )

    def encode(self, prompt: Any, **fields: Any) -> EncodedPrompt:
        (one,) = prompt_list(prompt)
        return self.inputs(**fields).encode(one)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def picture(width: int, height: int) -> PIL.Image.Image:
    return PIL.Image.new("RGB", (width, height), (0, 7, 9))


def refusal(function: Any, *arguments: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        function(*arguments, **fields)
    return str(refused.value)


def test_texts_and_token_ids_with_images(model: Model):
    text = f"a{PLACEHOLDER}b{PLACEHOLDER}"
    media = {"image": [picture(8, 4), picture(4, 4)]}
    found = model.encode({"prompt": text, "multi_modal_data": media})
    ids = model.tokenizer.encode(text)
    again = model.encode({"prompt_token_ids": ids, "multi_modal_data": media})
    assert (found.text, again.text) == (text, None)
    assert found.token_ids == again.token_ids
    assert [image.num_tokens for image in found.images] == [2, 1]
    assert found.token_ids.count(model.placeholder_id) == 3
    one = {"prompt": PLACEHOLDER, "multi_modal_data": {"image": picture(4, 4)}}
    assert [image.num_tokens for image in model.encode(one).images] == [1]


def test_prompts_without_images_are_unchanged(model: Model):
    for prompt in ("ab", {"prompt": "ab"}, {"prompt": "ab", "multi_modal_data": {"image": []}}):
        found = model.encode(prompt)
        assert (found.text, found.images) == ("ab", [])
        assert found.token_ids == model.tokenizer.encode("ab")


def test_conversations(model: Model):
    image = picture(8, 4)
    url = data_url(png(8, 4))
    shown = []
    for part in (
        {"type": "image_pil", "image_pil": image},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}, "uuid": "u"},
        {"type": "image_url", "image_url": {"url": url, "detail": "original"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
    ):
        content = [text_part("a"), part, text_part("b")]
        found = model.inputs().render([{"role": "user", "content": content}])
        assert [image.num_tokens for image in found.images] == [2]
        shown.append((found.token_ids, found.images))
    assert all(one == shown[0] for one in shown)
    plain = model.inputs().render([{"role": "user", "content": "hi"}])
    assert plain.token_ids == model.tokenizer.encode(
        model.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]),
        add_special_tokens=False,
    )


def test_conversations_of_a_model_without_images(model: Model):
    part = {"type": "image_pil", "image_pil": picture(4, 4)}
    messages = [{"role": "user", "content": [part]}]
    assert "takes no images" in refusal(model.inputs(takes_images=False).render, messages)


@pytest.mark.parametrize("takes_images", [True, False])
def test_texts_without_images_are_one_text(model: Model, takes_images: bool):
    inputs = model.inputs(takes_images=takes_images)
    parts, text = (
        inputs.render([{"role": "user", "content": content}])
        for content in ([text_part("a"), text_part("b")], "a\nb")
    )
    assert parts.token_ids == text.token_ids


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"prompt": "a", "multi_modal_data": {"film": []}}, "got the key 'film'"),
        ({"prompt": "a", "multi_modal_data": {"video": "x"}}, "must be an array of frames"),
        ({"prompt": "a", "multi_modal_data": {"video": b"x"}}, "takes no videos; send text and"),
        ({"prompt": "a", "multi_modal_data": {"image": [], "audio": (1, 2)}}, "must be a path"),
        ({"prompt": "a", "multi_modal_data": {"image": b"bytes"}}, "must be an image of Pillow"),
        ({"prompt": "a", "multi_modal_data": [1]}, "multi_modal_data must be"),
        ({"prompt": "a", "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({"multi_modal_data": {"image": picture(4, 4)}}, "a dictionary with nothing"),
        ({"prompt": "a", "multi_modal_data": {"image": picture(4, 4)}}, "but 1 image;"),
        (
            {"prompt": PLACEHOLDER * 2, "multi_modal_data": {"image": picture(4, 4)}},
            "2 times, but 1 image;",
        ),
    ],
)
def test_prompts_that_are_refused(model: Model, prompt: Any, text: str):
    assert text in refusal(model.encode, prompt)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "input_audio", "input_audio": "x"}, "must have the key data with base64 as"),
        ({"type": "video_url", "video_url": "x"}, "takes no videos; send text and images only"),
        ({"type": "video", "video": 5}, "messages[0].content[0].video must be an array of frames"),
        ({"type": "image"}, "got {'type': 'image'}"),
        ("text", "got 'text'"),
        ({"type": "text"}, "a part is {'type': 'text', 'text': ...}"),
        ({"type": "image_pil", "image_pil": "a.png"}, "image_pil must be an image of Pillow"),
        ({"type": "image_url", "image_url": {}}, "image_url must be a URL as text"),
        ({"type": "image_url", "image_url": {"url": "data:,", "size": 1}}, "the key 'size'"),
        ({"type": "image_url", "image_url": "data:,", "detail": "low"}, "the key 'detail'"),
        ({"type": "input_image", "image_url": "data:,", "detail": "huge"}, "detail must be one of"),
        ({"type": "image_url", "image_url": "data:,x"}, "image 1 is a data URL without"),
        ({"type": "image_url", "image_url": "https://a.test/x"}, "images.domains"),
    ],
)
def test_parts_that_are_refused(model: Model, part: Any, text: str):
    messages = [{"role": "user", "content": [part]}]
    assert text in refusal(model.inputs().render, messages)


def test_urls_are_fetched_also_while_an_event_loop_runs(model: Model):
    """As in a notebook. The address is listed, so the local server may be used."""

    async def main() -> None:
        data = png(8, 4)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        part = {"type": "image_url", "image_url": f"http://127.0.0.1:{port}/"}
        inputs = model.inputs(domains=["127.0.0.1"])
        messages = [{"role": "user", "content": [part]}]
        found = await asyncio.to_thread(inputs.render, messages)
        assert [image.num_tokens for image in found.images] == [2]
        server.close()

    asyncio.run(main())


def test_parameters_that_need_text(model: Model):
    images = model.encode(
        {"prompt": PLACEHOLDER, "multi_modal_data": {"image": picture(4, 4)}}
    ).images
    check_sampling_with_media(SamplingParams(), images)
    for name in ("truncate_prompt_tokens", "prompt_logprobs"):
        params = SamplingParams(**{name: 1})
        assert name in refusal(check_sampling_with_media, params, images)
        check_sampling_with_media(params, [])


def test_embeddings_take_no_images(model: Model):
    (prompt,) = prompt_list({"prompt": PLACEHOLDER, "multi_modal_data": {"image": picture(4, 4)}})
    assert "send text only" in refusal(model.inputs().token_ids, prompt)
