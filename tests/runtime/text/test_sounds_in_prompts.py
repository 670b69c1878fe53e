"""Sounds in the prompts of `LLM` and `AsyncEngine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.prompt_media import MediaLimits
from ostinato.runtime.text.encoded_prompts import EncodedPrompt, PromptInputs
from ostinato.runtime.text.offline_prompts import prompt_list
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.params import SamplingParams
from tests.api.media.image_apps import PLACEHOLDER, image_spec, served, text_part
from tests.api.media.sound_apps import (
    SHOWN,
    SOUND,
    audio_url,
    input_part,
    noise,
    save_sound_model,
    served_sounds,
    sound_spec,
    url_part,
    wav,
)
from tests.runtime.audio.audio_files import RATE

SAMPLES = noise(0.4)  # 40 frames, 20 states, 10 embeddings
FILE = wav(0.4)


class Model:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.placeholder_id = save_sound_model(directory)
        self.tokenizer = Tokenizer.from_path(directory)

    def inputs(self, takes: str = "sounds", **config: Any) -> PromptInputs:
        model = served(self.directory, None)
        if takes == "sounds":
            model = served_sounds(self.directory, sound_spec(self.placeholder_id))
        elif takes == "images":
            model = served(self.directory, image_spec(self.placeholder_id))
        media = MediaLimits(ImagesConfig(), VideoConfig(), AudioConfig(**config))
        return PromptInputs(model, self.tokenizer, media)

    def encode(self, prompt: Any, **config: Any) -> EncodedPrompt:
        (one,) = prompt_list(prompt)
        return self.inputs(**config).encode(one)

    def given(self, audio: Any, text: str = SOUND, **config: Any) -> EncodedPrompt:
        return self.encode({"prompt": text, "multi_modal_data": {"audio": audio}}, **config)

    def render(self, *parts: Any, **config: Any) -> EncodedPrompt:
        return self.inputs(**config).render([{"role": "user", "content": list(parts)}])

    def text(self, found: EncodedPrompt) -> str:
        """The prompt with one placeholder for each window of a sound."""
        ids = list(found.token_ids)
        for window in reversed(found.sounds):
            assert ids[window.begin : window.end] == [self.placeholder_id] * window.num_tokens
            del ids[window.begin + 1 : window.end]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def refusal(function: Any, *arguments: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        function(*arguments, **fields)
    return str(refused.value)


def test_texts_and_token_ids_with_sounds(model: Model):
    text = f"a{SHOWN}b{SHOWN}"
    media = {"audio": [(SAMPLES, RATE), (noise(2.5), RATE)]}
    found = model.encode({"prompt": text, "multi_modal_data": media})
    ids = model.tokenizer.encode(text)
    again = model.encode({"prompt_token_ids": ids, "multi_modal_data": media})
    assert (found.text, again.text) == (text, None)
    assert (found.token_ids, found.sounds) == (again.token_ids, again.sounds)
    assert [one.num_tokens for one in found.sounds] == [10, 25, 25, 12]
    assert model.text(found) == f"a{SHOWN}b{SHOWN.replace(SOUND, SOUND * 3)}"
    # The windows of a sound follow each other.
    first, *windows = found.sounds
    assert windows[0].begin > first.end
    assert windows[1].begin == windows[0].end
    assert found.token_ids.count(model.placeholder_id) == 72


def test_all_forms_of_sounds(model: Model, tmp_path: Path):
    (tmp_path / "a.wav").write_bytes(FILE)
    expected = model.given((SAMPLES, RATE))
    tensor = torch.from_numpy(SAMPLES)
    for audio in (
        SAMPLES,
        tensor,
        SAMPLES.tolist(),
        list(SAMPLES),
        [list(SAMPLES)],
        SAMPLES[None],
        [SAMPLES],
        [SAMPLES.tolist()],
        [(SAMPLES, RATE)],
        (tensor, float(RATE)),
        (np.stack([SAMPLES, SAMPLES]), RATE),
        FILE,
        bytearray(FILE),
        tmp_path / "a.wav",
        str(tmp_path / "a.wav"),
        [tmp_path / "a.wav"],
    ):
        found = model.given(audio)
        assert (found.token_ids, found.sounds) == (expected.token_ids, expected.sounds)
    two = model.given([SAMPLES, FILE], SOUND * 2)
    # The first axis of an array without a rate is that of the sounds, as in vLLM.
    for audio in (np.stack([SAMPLES, SAMPLES]), [(SAMPLES, RATE), tmp_path / "a.wav"]):
        assert model.given(audio, SOUND * 2) == two


def test_prompts_without_sounds_are_unchanged(model: Model):
    for audio in ([], (), None):
        found = model.given(audio, "ab")
        assert (found.text, found.sounds) == ("ab", [])
        assert found.token_ids == model.tokenizer.encode("ab")


def test_conversations(model: Model, tmp_path: Path):
    (tmp_path / "a.wav").write_bytes(FILE)
    expected = model.render(text_part("a"), url_part(FILE), text_part("b"))
    assert model.text(expected) == f"<|begin|>user\na{SHOWN}b<|end|>"
    assert [one.num_tokens for one in expected.sounds] == [10]
    for part in (
        url_part(FILE, uuid="u"),
        {"type": "audio_url", "audio_url": audio_url(FILE)},
        input_part(FILE),
        input_part(FILE, "mp3"),
        {"type": "audio", "audio": audio_url(FILE)},
        {"type": "audio", "audio": FILE},
        {"type": "audio", "audio": tmp_path / "a.wav"},
        {"type": "audio", "audio": (SAMPLES, RATE)},
        {"type": "audio", "audio": SAMPLES, "uuid": "u"},
        {"type": "audio", "audio": list(SAMPLES)},
        {"type": "audio", "audio": (np.stack([SAMPLES, SAMPLES]), RATE)},
    ):
        found = model.render(text_part("a"), part, text_part("b"))
        assert (found.token_ids, found.sounds) == (expected.token_ids, expected.sounds)


@pytest.mark.parametrize(
    ("audio", "text"),
    [
        (7, "multi_modal_data.audio must be a path, the bytes of a file, an array of samples"),
        ([7, "a"], "must be a path"),
        (SAMPLES.astype(complex), "multi_modal_data: sound 1: the array is of complex128"),
        ((SAMPLES, 0.5), "a whole number; got"),
        ((SAMPLES, float("nan")), "a whole number; got"),
        ((SAMPLES, float("inf")), "a whole number; got"),
        ((SAMPLES, 10), "multi_modal_data: sound 1: the sampling rate is 10 Hz"),
        ((SAMPLES, RATE, 1), "(samples, sampling_rate)"),
        (np.zeros((2, 2, 2)), "shape [2, 2, 2]"),
        (b"no sound", "sound 1: the file cannot be read as audio"),
        ("nothing.wav", "sound 1: the file nothing.wav cannot be read"),
        (noise(3.5), "sound 1: the audio is longer than the 3 s that the model takes at once"),
        ([SAMPLES, noise(0.01)], "sound 2: the audio is 10 ms long"),
        ([SAMPLES] * 9, "has 9 sounds, and audio.max_per_request allows 8; send fewer"),
        ([SAMPLES] * 2, "once, but 2 sounds; the numbers must be equal; write '<|AUDIO|>' in"),
        (
            np.zeros((16_000, 2), np.float32),
            "multi_modal_data.audio has the shape [16000, 2] without a rate, which is 16000 sounds,"
            " and audio.max_per_request allows 8; give (samples, rate) if the axes are",
        ),
        (np.zeros((9, 6400), np.float32), "shape [9, 6400] without a rate, which is 9 sounds"),
        ([0.5, 10**400], "multi_modal_data.audio has a whole number that is out of range"),
        ([0.5, 1e300] * 3200, "sound 1: the audio has samples that are no finite numbers"),
        ([True, 0.5], "must be a path"),
    ],
)
def test_prompts_that_are_refused(model: Model, audio: Any, text: str):
    assert text in refusal(model.given, audio)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "input_audio", "input_audio": FILE}, "input_audio must have the key data"),
        ({"type": "input_audio", "input_audio": {"data": FILE}}, "base64 as text"),
        ({"type": "input_audio", "input_audio": {"data": "A"}}, "sound 1 is not valid base64"),
        ({"type": "input_audio", "input_audio": {"data": "", "rate": 1}}, "the key 'rate'"),
        ({"type": "audio_url", "audio_url": {"url": 7}}, "must be a URL as text, got int"),
        ({"type": "audio_url", "audio_url": {}}, "must be a URL as text, got NoneType"),
        ({"type": "audio_url", "audio_url": "a.wav"}, "must begin with data:, https:// or http://"),
        ({"type": "audio_url", "audio_url": "https://a.test/x"}, "fetches no sounds (images.dom"),
        ({"type": "audio_url", "audio_url": "data:,x"}, "write data:audio/wav;base64,DATA"),
        (
            {"type": "audio", "audio": np.stack([SAMPLES, SAMPLES])},
            "messages[0].content[0].audio has the shape [2, 6400] without a rate, and a part has "
            "one sound; give (samples, rate), or one part for each sound",
        ),
        ({"type": "audio", "audio": [0, 10**400]}, "[0].audio has a whole number that is out of"),
        ({"type": "audio", "audio": 7}, "messages[0].content[0].audio must be a path"),
        ({"type": "audio", "audio": FILE, "detail": "low"}, "the key 'detail'"),
        (text_part(SOUND), "once, but 0 sounds; the numbers must be equal; leave"),
        ({"type": "sound", "sound": FILE}, "input_audio, audio_url, audio, got {"),
    ],
)
def test_parts_that_are_refused(model: Model, part: Any, text: str):
    assert text in refusal(model.render, part)


def test_models_that_take_none(model: Model):
    for takes, text in (
        ("text", "vision takes no sounds; send text only"),
        ("images", "vision takes no sounds; send text and images only"),
    ):
        assert text in refusal(model.given, SAMPLES, takes=takes)
        assert text in refusal(model.render, url_part(FILE), takes=takes)
    hint = "takes no sounds (audio.max_per_request is 0); send text only"
    assert hint in refusal(model.given, SAMPLES, takes="text", max_per_request=0)
    image = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
    text = "listener takes no images; send text and sounds only"
    assert text in refusal(model.render, image)
    assert text in refusal(model.render, image, url_part(FILE))


def test_parameters_that_need_text(model: Model):
    found = model.given(SAMPLES)
    assert found.adjusted(SamplingParams()) == SamplingParams()
    for name in ("truncate_prompt_tokens", "prompt_logprobs"):
        text = f"{name} cannot be combined with images, videos and audio; leave it out"
        assert refusal(found.adjusted, SamplingParams(**{name: 1})) == text


def test_embeddings_take_no_sounds(model: Model):
    (prompt,) = prompt_list({"prompt": PLACEHOLDER, "multi_modal_data": {"audio": SAMPLES}})
    assert "send text only" in refusal(model.inputs().token_ids, prompt)
