"""Sounds in chat bodies, up to the request that the engine gets."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.prompt_media import FetchWanted
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from tests.api.media.image_apps import (
    TEXT_TEMPLATE,
    Source,
    image_part,
    image_spec,
    png,
    served,
    text_part,
)
from tests.api.media.sound_apps import (
    END,
    SHOWN,
    SOUND,
    START,
    audio_url,
    input_part,
    save_sound_model,
    served_sounds,
    sound_spec,
    url_part,
    wav,
)

URL = "https://media.test/a.wav"
FILE = wav(0.4)  # 40 frames, 20 states, 10 embeddings


class Model:
    """Prepares requests for a model that takes sounds."""

    def __init__(self, directory: Path, **template: str) -> None:
        directory.mkdir()
        self.directory = directory
        self.placeholder_id = save_sound_model(directory, **template)
        self.tokenizer = Tokenizer.from_path(directory)
        self.parts: list[tuple[str, float]] = []

    def served(self, **fields: Any) -> ServedModel:
        return served_sounds(self.directory, sound_spec(self.placeholder_id), **fields)

    def preparation(
        self,
        *,
        granted: Grant = Grant.audio,
        model: ServedModel | None = None,
        domains: list[str] | None = None,
        **audio: Any,
    ) -> Preparation:
        config = PreparationSettings(
            images=ImagesConfig(domains=domains or []), audio=AudioConfig(**audio)
        )
        return Preparation(
            Source(model or self.served(), self.tokenizer),
            config,
            lambda name, cpu_s: self.parts.append((name, cpu_s)),
            granted=granted,
        )

    def chat(
        self,
        *parts: Any,
        role: str = "user",
        fetched: dict[str, bytes] | None = None,
        fields: dict[str, Any] | None = None,
        **values: Any,
    ) -> Generation:
        messages = [{"role": role, "content": list(parts)}]
        body = json.dumps({"messages": messages, **(fields or {})}).encode()
        arrival = Arrival(fetched=fetched or {})
        return prepare_chat_completion(self.preparation(**values), body, arrival).ready.generation

    def text(self, generation: Generation) -> str:
        """The prompt with one placeholder token for each window of a sound."""
        ids = list(generation.prompt_token_ids)
        for window in reversed(generation.sounds):
            expected = [self.placeholder_id] * window.num_tokens
            assert ids[window.begin : window.end] == expected
            del ids[window.begin + 1 : window.end]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("text") / "model", template=TEXT_TEMPLATE)


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def refusal(function: Any, *arguments: Any, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        function(*arguments, **fields)
    assert refused.value.status == 400
    return refused.value


class TestOrder:
    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(["red", "a b"]), st.integers(1, 5)), max_size=5))
    def test_texts_and_sounds_keep_their_order(self, model: Model, pieces: list[Any]):
        """A number stands for a sound of so many half seconds."""
        parts: list[Any] = []
        shown, sizes = "<|begin|>user\n", []
        for one in pieces or ["a"]:
            if isinstance(one, str):
                parts.append(text_part(one))
                shown += one
            else:
                parts.append((url_part, input_part)[one % 2](wav(one / 2, seed=one)))
                windows = [25] * (one // 2) + [12] * (one % 2)
                shown += SHOWN.replace(SOUND, SOUND * len(windows))
                sizes += windows
        if not sizes:
            shown = "<|begin|>user\n" + "\n".join(pieces or ["a"])
        generation = model.chat(*parts, model=model.served(media_cache_tokens=400))
        assert [one.num_tokens for one in generation.sounds] == sizes
        assert [len(one.features) for one in generation.sounds] == [
            one.num_bytes for one in generation.sounds
        ]
        assert model.text(generation) == shown + "<|end|>"
        assert num_media_bytes([generation]) == sum(
            {one.digest: one.num_bytes for one in generation.sounds}.values()
        )

    def test_a_template_that_does_not_show_sounds(self, text_model: Model):
        generation = text_model.chat(text_part("a"), url_part(FILE), text_part("b"))
        assert text_model.text(generation) == f"<|begin|>user\na\n{SHOWN}\nb<|end|>"


class TestForms:
    def test_all_forms_of_a_part_are_one_request(self, model: Model):
        expected = model.chat(text_part("a"), url_part(FILE))
        assert [one.num_tokens for one in expected.sounds] == [10]
        for part in (
            {"type": "audio_url", "audio_url": audio_url(FILE)},
            url_part(FILE, uuid="mine"),
            url_part(FILE, cache_control={"type": "ephemeral"}),
            {"type": "audio_url", "audio_url": {"url": audio_url(FILE, "text/plain")}},
            input_part(FILE),
            input_part(FILE, "mp3", uuid="mine"),  # the bytes decide the format
            {"type": "input_audio", "input_audio": {"data": base64_text(FILE)}},
            {"type": "input_audio", "input_audio": {"data": base64.encodebytes(FILE).decode()}},
        ):
            found = model.chat(text_part("a"), part)
            assert found.sounds == expected.sounds
            assert found.prompt_token_ids == expected.prompt_token_ids

    def test_results_of_tools(self, model: Model):
        """The template does not know tools, so results become messages of the user."""
        call = {"id": "c", "type": "function", "function": {"name": "hear", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [input_part(FILE)]},
        ]
        body = json.dumps({"messages": messages}).encode()
        prepared = prepare_chat_completion(model.preparation(), body, Arrival())
        assert f"Result of hear: {SHOWN}<|end|>" in model.text(prepared.ready.generation)

    def test_tokenize_counts_the_tokens_of_sounds(self, model: Model):
        generation = model.chat(text_part("a"), input_part(FILE))
        messages = [{"role": "user", "content": [text_part("a"), input_part(FILE)]}]
        body = json.dumps({"messages": messages}).encode()
        answer = prepare_tokenization(model.preparation(), body, Arrival())
        assert msgspec.json.decode(answer)["tokens"] == generation.prompt_token_ids


class TestRefused:
    def test_models_that_take_no_sounds(self, model: Model, tmp_path: Path):
        text = served(model.directory, None)
        error = refusal(model.chat, input_part(FILE), model=text, granted=Grant.text)
        assert (error.param, error.code) == ("messages", "unsupported_parameter")
        assert "vision takes no sounds; send text only" in str(error)
        llava = served(model.directory, image_spec(model.placeholder_id))
        parts = [image_part(png(4, 4)), url_part(FILE)]
        error = refusal(model.chat, *parts, model=llava, granted=Grant.text)
        assert "vision takes no sounds; send text and images only" in str(error)
        off = {"max_per_request": 0, "granted": Grant.text}
        error = refusal(model.chat, url_part(FILE), model=text, **off)
        assert "takes no sounds (audio.max_per_request is 0); send text only" in str(error)
        error = refusal(model.chat, image_part(png(4, 4)), url_part(FILE), granted=Grant.text)
        assert "listener takes no images; send text and sounds only" in str(error)
        whisper = served(model.directory, None, tasks=(ServedTask.transcribe,))
        error = refusal(model.chat, url_part(FILE), model=whisper, granted=Grant.text)
        assert error.code == "unsupported_task"

    @pytest.mark.parametrize("role", ["system", "developer", "assistant"])
    def test_roles_without_sounds(self, model: Model, role: str):
        error = refusal(model.chat, input_part(FILE), role=role)
        assert error.param == "messages[0].content"
        assert f"has a sound, and a message of the role '{role}' has text only" in str(error)

    @pytest.mark.parametrize(
        ("part", "text"),
        [
            ({"type": "input_audio"}, "messages[0].content[0].input_audio is required"),
            ({"type": "input_audio", "input_audio": {}}, "input_audio.data is required"),
            ({"type": "input_audio", "input_audio": base64_text(FILE)}, "Expected `object`"),
            (input_part(FILE, "pcm16"), 'Invalid enum value \'pcm16\'; allowed: "aac", "flac"'),
            (input_part(FILE, detail="low"), "detail is not a field"),
            ({"type": "audio_url", "audio_url": 7}, "Expected `"),
            ({"type": "audio_url", "audio_url": {"data": "a"}}, "audio_url"),
            ({"type": "audio", "audio": "x"}, "or audio (docs/audio.md)"),
            ({"type": "input_sound", "input_sound": {}}, "a video (docs/video.md) or audio"),
        ],
    )
    def test_parts(self, model: Model, part: dict[str, Any], text: str):
        error = refusal(model.chat, part, granted=Grant.text)
        assert text in str(error)
        assert (error.param or "").startswith("messages[0].content[0]")

    @pytest.mark.parametrize(
        ("url", "code", "text"),
        [
            ("data:audio/wav,abc", "invalid_audio_url", "sound 2 is a data URL without ';base64,'"),
            ("data:audio/wav;base64,AAA", "invalid_audio_url", "sound 2 is not valid base64"),
            ("data:audio/wav;base64,", "invalid_audio", "sound 2: the file is empty"),
            (audio_url(b"text, no sound"), "invalid_audio", "sound 2: the file cannot be read"),
            (audio_url(wav(3)[:-40_000]), "invalid_audio", "sound 2: the file is damaged"),
            (audio_url(png(4, 4)), "invalid_audio", "sound 2"),
            (audio_url(b"#EXTM3U\nfile:///etc/passwd\n"), "invalid_audio", "sound 2"),
            (audio_url(wav(1 / 16_000)), "invalid_audio", "sound 2: the audio is 0.0625 ms long"),
            (audio_url(wav(3.5)), "audio_too_long", "longer than the 3 s that the model takes"),
            ("file:///etc/passwd", "invalid_audio_url", "it must begin with data:"),
            (URL, "invalid_audio_url", "this server fetches no sounds (images.domains)"),
        ],
    )
    def test_urls(self, model: Model, url: str, code: str, text: str):
        part = {"type": "audio_url", "audio_url": {"url": url}}
        error = refusal(model.chat, url_part(FILE), part)
        assert (error.param, error.code) == ("messages", code)
        assert text in str(error)

    def test_base64_of_openai(self, model: Model):
        for data in ("A", "A===", "!!!!", audio_url(FILE)):
            part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
            error = refusal(model.chat, part)
            assert (error.param, error.code) == ("messages", "invalid_audio")
            assert "sound 1 is not valid base64" in str(error)
        assert "leave out 'data:...;base64,', or send it as audio_url" in str(error)

    def test_limits(self, model: Model):
        parts = [input_part(wav(0.4, seed=seed)) for seed in range(3)]
        error = refusal(model.chat, *parts, max_per_request=2, granted=Grant.text)
        assert error.code == "too_many_sounds"
        assert "3 sounds, and audio.max_per_request allows 2; send fewer" in str(error)
        for part in (*parts[:1], url_part(wav(0.4))):
            error = refusal(model.chat, part, max_mib=0.001)
            assert (error.param, error.code) == ("messages", "audio_too_large")
            assert "audio.max_mib allows 1048; send a smaller sound" in str(error)
        error = refusal(model.chat, *parts, max_seconds=0.3)
        assert error.code == "audio_too_long"
        assert "longer than the 0.3 s that are allowed (audio.max_seconds)" in str(error)
        assert len(model.chat(*parts, model=model.served(media_cache_tokens=30)).sounds) == 3
        error = refusal(model.chat, *parts, model=model.served(media_cache_tokens=29))
        assert error.code == "too_many_embeddings"
        assert (
            "the first 3 sounds have 30 embeddings, and a request can have 29 "
            "(audio.cache_tokens); send fewer or shorter ones" in str(error)
        )
        error = refusal(model.chat, input_part(wav(3)), model=model.served(max_model_len=80))
        assert error.code == "context_length_exceeded"

    @pytest.mark.parametrize("text", [SOUND, SHOWN, f"hear {SOUND} here"])
    def test_the_placeholder_in_a_text(self, model: Model, text: str):
        for parts in ([text_part(text), input_part(FILE)], [text_part(text)]):
            error = refusal(model.chat, *parts)
            assert (error.param, error.code) == ("messages", "invalid_audio")
            assert "leave '<|AUDIO|>' out of the text" in str(error)

    def test_the_other_tokens_of_sounds_are_text(self, model: Model):
        generation = model.chat(text_part(f"{START}{END}"), input_part(FILE))
        assert model.text(generation) == f"<|begin|>user\n{START}{END}{SHOWN}<|end|>"

    @pytest.mark.parametrize(
        ("name", "value"),
        [("truncate_prompt_tokens", 5), ("prompt_logprobs", 0), ("return_token_offsets", True)],
    )
    def test_fields_that_need_text(self, model: Model, name: str, value: Any):
        error = refusal(model.chat, input_part(FILE), fields={name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert "cannot be combined with images, videos and audio" in str(error)

    def test_speech_as_output(self, model: Model):
        for fields in ({"audio": {"voice": "a", "format": "wav"}}, {"modalities": ["audio"]}):
            (name,) = fields
            error = refusal(model.chat, input_part(FILE), fields=fields)
            assert (error.param, error.code) == (name, "unsupported_parameter")


class TestAnyUrl:
    @settings(max_examples=150, deadline=None)
    @given(
        st.sampled_from(["data:", "data:audio/wav;base64,", "http:", ""]),
        st.one_of(
            st.text(max_size=30),
            st.binary(max_size=200).map(lambda data: base64_text(FILE + data)),
            st.binary(max_size=60).map(lambda data: base64_text(FILE[:30] + data + FILE[60:])),
            st.integers(0, 1500).map(lambda size: base64_text(FILE[:size])),
        ),
    )
    def test_a_url_is_a_sound_or_refused(self, model: Model, head: str, rest: str):
        try:
            generation = model.chat({"type": "audio_url", "audio_url": {"url": head + rest}})
        except InvalidRequestError as error:
            refused = error
        else:
            assert generation.sounds
            return
        assert (refused.status, refused.param) == (400, "messages")
        assert "sound 1" in str(refused)


class TestWhereItRuns:
    @pytest.mark.parametrize(
        ("parts", "fields", "needed"),
        [
            ([input_part(FILE), text_part("a")], {}, Grant.audio),
            ([url_part(FILE)], {"chat_template": "a"}, Grant.audio),
            ([text_part("a")], {"chat_template": "a"}, Grant.template),
        ],
    )
    def test_a_fork_without_the_grant_says_what_is_needed(
        self, model: Model, parts: list[Any], fields: dict[str, Any], needed: Grant
    ):
        """It decodes nothing before."""
        for granted in Grant:
            if granted < needed:
                model.parts.clear()
                with pytest.raises(ForkNeededError) as error:
                    model.chat(*parts, fields=fields, granted=granted)
                assert error.value.needed is needed
                assert [name for name, _ in model.parts] == ["the body"]
        assert model.chat(text_part("a"), granted=Grant.text).sounds == []

    def test_each_sound_has_a_limit_of_processor_time(self, model: Model):
        model.parts.clear()
        model.chat(input_part(FILE), url_part(FILE))
        limits = [part for part in model.parts if part[0].startswith("messages:")]
        assert limits == [
            ("messages: sound 1", pytest.approx(20.15)),
            ("messages: sound 2", pytest.approx(20.15)),
        ]

    def test_urls_must_be_fetched_first(self, model: Model):
        parts = [url_part(FILE), *[{"type": "audio_url", "audio_url": URL}] * 2]
        for granted in (Grant.text, Grant.audio):
            with pytest.raises(FetchNeededError) as needed:
                model.chat(*parts, domains=["media.test"], granted=granted)
            assert needed.value.wanted == {URL: FetchWanted("messages: sound 2", MediaKind.sound)}
        generation = model.chat(*parts, domains=["media.test"], fetched={URL: wav(0.8)})
        assert [one.num_tokens for one in generation.sounds] == [10, 20, 20]
