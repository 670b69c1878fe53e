"""Videos in the prompts of `LLM` and `AsyncEngine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.models.vision.image_spec import ImageSpec
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
from tests.api.media.image_apps import PLACEHOLDER, data_url, png, served, text_part
from tests.api.media.video_apps import SHOWN, VIDEO, save_video_model, video_spec
from tests.runtime.video.video_files import encode, film

FILM = encode(film(20, 16, 16), "mp4-mpeg4", fps=10)  # two seconds, so four frames
FRAMES = film(4, 16, 16)


class Model:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ids = save_video_model(directory)
        self.tokenizer = Tokenizer.from_path(directory)

    def spec(self, **fields: Any) -> ImageSpec:
        return video_spec(self.ids, **fields)

    def inputs(self, spec: ImageSpec | None = None, **config: Any) -> PromptInputs:
        model = served(self.directory, spec or self.spec(), media_cache_tokens=1000)
        media = MediaLimits(ImagesConfig(), VideoConfig(**config), AudioConfig())
        return PromptInputs(model, self.tokenizer, media)

    def encode(self, prompt: Any, spec: ImageSpec | None = None, **config: Any) -> EncodedPrompt:
        (one,) = prompt_list(prompt)
        return self.inputs(spec, **config).encode(one)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def refusal(function: Any, *arguments: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        function(*arguments, **fields)
    return str(refused.value)


def test_texts_and_token_ids_with_videos(model: Model):
    text = f"a{SHOWN}b"
    media = {"video": FRAMES}
    found = model.encode({"prompt": text, "multi_modal_data": media})
    ids = model.tokenizer.encode(text)
    again = model.encode({"prompt_token_ids": ids, "multi_modal_data": media})
    assert (found.text, again.text) == (text, None)
    assert found.token_ids == again.token_ids
    assert [image.num_frames for image in found.images] == [2, 2]
    begin, num_tokens = ids.index(model.ids[VIDEO]), found.images[0].num_tokens
    assert [image.begin for image in found.images] == [begin, begin + num_tokens]
    expected = [*ids[:begin], *[model.ids[VIDEO]] * (2 * num_tokens), *ids[begin + 1 :]]
    assert found.token_ids == expected


def test_images_and_videos_of_one_prompt(model: Model):
    media = {"image": PIL.Image.new("RGB", (8, 8)), "video": [FRAMES, FILM]}
    found = model.encode({"prompt": f"{SHOWN}{PLACEHOLDER}{SHOWN}", "multi_modal_data": media})
    assert [image.num_frames for image in found.images] == [2, 2, 1, 2, 2]
    assert [image.begin for image in found.images] == sorted(i.begin for i in found.images)
    for image in found.images:
        token = model.ids[PLACEHOLDER if image.num_frames == 1 else VIDEO]
        assert found.token_ids[image.begin : image.end] == [token] * image.num_tokens


def test_every_form_of_a_conversation(model: Model, tmp_path: Path):
    (tmp_path / "film.mp4").write_bytes(FILM)
    url = data_url(FILM, "video/mp4")
    shown = []
    for part in (
        {"type": "video_url", "video_url": {"url": url}, "uuid": "u"},
        {"type": "video_url", "video_url": url},
        {"type": "video", "video": url},
        {"type": "video", "video": FILM},
        {"type": "video", "video": tmp_path / "film.mp4"},
        {"type": "video", "video": FILM, "num_frames": 4},
        {"type": "video", "video": FILM, "fps": 2},
    ):
        content = [text_part("a"), part, text_part("b")]
        found = model.inputs().render([{"role": "user", "content": content}])
        assert len(found.images) == 2
        shown.append((found.token_ids, found.images))
    assert all(one == shown[0] for one in shown)


def test_what_chooses_frames(model: Model):
    def count(part: dict[str, Any], **config: Any) -> int:
        messages = [{"role": "user", "content": [part]}]
        return len(model.inputs(**config).render(messages).images)

    assert count({"type": "video", "video": FILM, "num_frames": 10}) == 5
    assert count({"type": "video", "video": FILM, "fps": 3}) == 3
    assert count({"type": "video", "video": FILM}, fps=5.0) == 5
    assert count({"type": "video", "video": FRAMES}, fps=5.0) == 2
    messages = [{"role": "user", "content": [{"type": "video", "video": FILM, "num_frames": 33}]}]
    assert "video.max_frames" in refusal(model.inputs().render, messages)


def test_times_as_text(model: Model):
    """Each pair has its time before it. The times are tokenised alone."""
    spec = model.spec(states_times=True)
    media = {"video": (FRAMES, {"fps": 1.0})}
    found = model.encode({"prompt": f"a{SHOWN}b", "multi_modal_data": media}, spec)
    ids, pads = model.tokenizer.encode, [model.ids[VIDEO]] * found.images[0].num_tokens
    start, end = model.ids["<|vision_start|>"], model.ids["<|vision_end|>"]
    expected = ids("a")
    for time in ("<0.5 seconds>", "<2.5 seconds>"):
        expected += [*ids(time, add_special_tokens=False), start, *pads, end]
    assert found.token_ids == [*expected, *ids("b", add_special_tokens=False)]


def test_pictures_and_videos_in_a_conversation(model: Model):
    content = [
        {"type": "video", "video": FRAMES},
        {"type": "image_url", "image_url": data_url(png(8, 8))},
        text_part("which?"),
    ]
    found = model.inputs().render([{"role": "user", "content": content}])
    assert [image.num_frames for image in found.images] == [2, 2, 1]


def test_no_videos(model: Model):
    for prompt in ("ab", {"prompt": "ab", "multi_modal_data": {"video": []}}):
        found = model.encode(prompt)
        assert (found.text, found.images) == ("ab", [])
    text = f"a{VIDEO}b{PLACEHOLDER}"
    assert "once, but 0 videos" in refusal(
        model.encode, {"prompt": text, "multi_modal_data": {"image": PIL.Image.new("RGB", (8, 8))}}
    )
    assert "0 times, but 1 video;" in refusal(
        model.encode, {"prompt": "ab", "multi_modal_data": {"video": FRAMES}}
    )


def test_too_many_embeddings(model: Model):
    media = {"video": np.zeros((32, 32, 32, 3), np.uint8)}
    assert "(images.cache_tokens); send fewer or smaller frames" in refusal(
        model.encode, {"prompt": SHOWN, "multi_modal_data": media}
    )


def test_parameters_that_need_text(model: Model):
    found = model.encode({"prompt": SHOWN, "multi_modal_data": {"video": FRAMES}})
    params = SamplingParams(prompt_logprobs=1)
    assert "prompt_logprobs cannot be combined with images, videos and audio" in refusal(
        check_sampling_with_media, params, found.images
    )
    (prompt,) = prompt_list({"prompt": SHOWN, "multi_modal_data": {"video": FRAMES}})
    assert "send text only" in refusal(model.inputs().token_ids, prompt)
