"""Videos in chat bodies, up to the request that the engine gets."""

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
from ostinato.api.preparation.generation import Generation
from ostinato.api.preparation.preparation import (
    Arrival,
    FetchNeededError,
    ForkNeededError,
    Grant,
    Preparation,
    PreparationSettings,
)
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.prompt_media import FetchWanted
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.api.media.image_apps import (
    TEXT_TEMPLATE,
    Source,
    data_url,
    image_part,
    png,
    served,
    text_part,
)
from tests.api.media.video_apps import (
    END,
    SHOWN,
    START,
    VIDEO,
    film,
    film_url,
    frames_url,
    save_video_model,
    video_part,
    video_spec,
)

URL = "https://media.test/a.mp4"
FILM = film_url(film(40, fps=10))  # 4 seconds


class Model:
    """Prepares requests for a model that takes images and videos."""

    def __init__(self, directory: Path, **template: str) -> None:
        directory.mkdir()
        self.directory = directory
        self.ids = save_video_model(directory, **template)
        self.tokenizer = Tokenizer.from_path(directory)
        self.parts: list[tuple[str, float]] = []

    def preparation(
        self,
        *,
        granted: Grant = Grant.videos,
        spec: Any = "default",
        images: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        **video: Any,
    ) -> Preparation:
        spec = video_spec(self.ids) if spec == "default" else spec
        config = PreparationSettings(
            images=ImagesConfig(**(images or {})), video=VideoConfig(**video)
        )
        return Preparation(
            Source(served(self.directory, spec, **(model or {})), self.tokenizer),
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
        """The prompt with one placeholder token for each image and each pair of frames."""
        ids = list(generation.prompt_token_ids)
        for image in reversed(generation.images):
            placeholder = self.ids["<|image_pad|>" if image.num_frames == 1 else VIDEO]
            assert ids[image.begin : image.end] == [placeholder] * image.num_tokens
            del ids[image.begin + 1 : image.end]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("video") / "model")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("text") / "model", template=TEXT_TEMPLATE)


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def sampled(**values: Any) -> dict[str, Any]:
    return {"media_io_kwargs": {"video": values}}


def refusal(function: Any, *arguments: Any, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        function(*arguments, **fields)
    assert refused.value.status == 400
    return refused.value


class TestOrder:
    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.sampled_from(["red", "a b"]),
                st.integers(1, 3),
                st.tuples(st.integers(1, 7), st.integers(0, 3)),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def test_texts_images_and_videos_keep_their_order(self, model: Model, pieces: list[Any]):
        """A number stands for an image of this width, a pair for the frames of a video."""
        parts: list[Any] = []
        shown, sizes = "<|begin|>user\n", []
        for one in pieces:
            if isinstance(one, str):
                parts.append(text_part(one))
                shown += one
            elif isinstance(one, int):
                parts.append(image_part(png(4 * one, 4)))
                shown += "[<|image_pad|>]"
                sizes.append((1, one))
            else:
                count, seed = one
                parts.append(video_part(frames_url(count, seed=seed)))
                num_pairs = (count + 1) // 2
                shown += SHOWN.replace(VIDEO, VIDEO * num_pairs)
                sizes += [(2, 16)] * num_pairs
        if all(isinstance(one, str) for one in pieces):
            shown = "<|begin|>user\n" + "\n".join(pieces)
        generation = model.chat(*parts, max_per_request=5)
        assert [(one.num_frames, one.num_tokens) for one in generation.images] == sizes
        assert [len(one.pixels) for one in generation.images] == [
            frames * 48 * tokens for frames, tokens in sizes
        ]
        assert model.text(generation) == shown + "<|end|>"

    def test_a_template_that_does_not_show_videos(self, text_model: Model):
        parts = [text_part("a"), video_part(frames_url(4)), text_part("b")]
        generation = text_model.chat(*parts)
        pairs = SHOWN.replace(VIDEO, VIDEO * 2)
        assert text_model.text(generation) == f"<|begin|>user\na\n{pairs}\nb<|end|>"

    def test_times_are_written_before_the_pairs(self, model: Model):
        """Frames 0, 13, 26, 39 of 10 a second: the pairs' mean times are 0.65 and 3.25 s."""
        spec = video_spec(model.ids, states_times=True, limits_whole=True, max_pixels=1 << 14)
        generation = model.chat(
            text_part("a"), video_part(FILM), fields=sampled(num_frames=4), spec=spec
        )
        texts = "".join(f"<{time:.1f} seconds>{START}{VIDEO}{END}" for time in (0.65, 3.25))
        assert model.text(generation) == f"<|begin|>user\na{texts}<|end|>"


class TestForms:
    def test_all_forms_of_a_part_are_one_request(self, model: Model):
        expected = model.chat(text_part("a"), video_part(FILM))
        for part in (
            {"type": "video_url", "video_url": FILM},
            video_part(FILM, uuid="mine"),
            video_part(FILM, cache_control={"type": "ephemeral"}),
            video_part(FILM.replace("video/mp4", "text/plain")),
        ):
            found = model.chat(text_part("a"), part)
            assert found.images == expected.images
            assert found.prompt_token_ids == expected.prompt_token_ids

    def test_results_of_tools(self, model: Model):
        """The template does not know tools, so results become messages of the user."""
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [video_part(frames_url(2))]},
        ]
        body = json.dumps({"messages": messages}).encode()
        prepared = prepare_chat_completion(model.preparation(), body, Arrival())
        assert f"Result of look: {SHOWN}<|end|>" in model.text(prepared.ready.generation)

    def test_tokenize_counts_the_tokens_of_videos(self, model: Model):
        for fields in ({}, sampled(num_frames=10)):
            generation = model.chat(text_part("a"), video_part(FILM), fields=fields)
            messages = [{"role": "user", "content": [text_part("a"), video_part(FILM)]}]
            body = json.dumps({"messages": messages, **fields}).encode()
            answer = prepare_tokenization(model.preparation(), body, Arrival())
            assert msgspec.json.decode(answer)["tokens"] == generation.prompt_token_ids


class TestFrames:
    @pytest.mark.parametrize(
        ("fields", "config", "num_pairs"),
        [
            ({}, {}, 4),  # 2 frames a second, as the spec says
            ({}, {"fps": 5.0}, 10),
            ({}, {"fps": 5.0, "max_frames": 8}, 4),
            ({}, {"fps": 60.0}, 16),  # video.max_frames
            ({}, {"fps": 60.0, "max_frames": 64}, 20),  # the file has 40
            (sampled(num_frames=12), {"fps": 5.0}, 6),
            (sampled(num_frames=7), {}, 4),  # the last one is repeated
            (sampled(fps=1), {"fps": 5.0}, 2),
            (sampled(fps=0.01), {}, 2),  # at least 4 frames, as the spec says
            (sampled(fps=60), {"max_frames": 9}, 5),
            ({"media_io_kwargs": {}}, {}, 4),
        ],
    )
    def test_the_number_of_frames(self, model: Model, fields, config, num_pairs):
        room = {"media_cache_tokens": 320}
        generation = model.chat(video_part(FILM), fields=fields, model=room, **config)
        assert len(generation.images) == num_pairs

    def test_the_first_and_the_last_frame_are_used(self, model: Model):
        """Each frame of the film has one grey."""
        generation = model.chat(video_part(FILM), fields=sampled(num_frames=4))
        seen = [[half[0] for half in halves(one.pixels)] for one in generation.images]
        expected = [[60 + 11 * index & 255 for index in pair] for pair in ((0, 13), (26, 39))]
        assert all(
            abs(found - wanted) <= 4
            for pair, greys in zip(seen, expected, strict=True)
            for found, wanted in zip(pair, greys, strict=True)
        )

    def test_more_frames_than_the_setting_allows(self, model: Model):
        for number in (33, 10**9):
            error = refusal(model.chat, video_part(FILM), fields=sampled(num_frames=number))
            assert f"num_frames={number} must be from 1 to 32 (video.max_frames)" in str(error)
        error = refusal(model.chat, video_part(frames_url(4)), fields=sampled(num_frames=4))
        assert "video 1 has its frames as JPEG files" in str(error)
        assert error.param == "media_io_kwargs.video"

    @pytest.mark.parametrize("takes_videos", [True, False])
    @pytest.mark.parametrize("has_video", [True, False])
    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"num_frames": 33}, "num_frames=33 must be from 1 to 32 (video.max_frames); ask for"),
            ({"fps": 1e6}, "fps=1e+06 must be above 0 and at most 60; ask for another rate"),
            ({"fps": 1, "num_frames": 4}, "num_frames and fps cannot be combined; leave one out"),
        ],
    )
    def test_the_field_is_checked_with_and_without_videos(
        self, model: Model, values, text, has_video: bool, takes_videos: bool
    ):
        parts = [text_part("a"), *([video_part(FILM)] if has_video else [])]
        config: dict[str, Any] = {} if takes_videos else {"spec": None}
        error = refusal(model.chat, *parts, fields=sampled(**values), **config)
        assert (error.param, error.code) == ("media_io_kwargs.video", "invalid_value")
        assert str(error).startswith(f"media_io_kwargs.video: {text}")
        body = {"messages": [{"role": "user", "content": parts}], **sampled(**values)}
        error = refusal(
            prepare_tokenization,
            model.preparation(**config),
            json.dumps(body).encode(),
            Arrival(),
        )
        assert error.param == "media_io_kwargs.video"

    def test_a_field_without_effect(self, model: Model):
        for config in ({}, {"spec": None}):
            assert not model.chat(text_part("a"), fields=sampled(num_frames=9), **config).images


def halves(pixels: bytes) -> tuple[bytes, bytes]:
    middle = len(pixels) // 2
    return pixels[:middle], pixels[middle:]


class TestRefused:
    def test_models_that_take_no_videos(self, model: Model):
        error = refusal(model.chat, video_part(FILM), spec=None, granted=Grant.text)
        assert (error.param, error.code) == ("messages", "unsupported_parameter")
        assert "vision takes no videos; send text only" in str(error)
        images_only = msgspec.structs.replace(video_spec(model.ids), video=None)
        parts = [image_part(png(4, 4)), video_part(FILM)]
        error = refusal(model.chat, *parts, spec=images_only, granted=Grant.text)
        assert "vision takes no videos; send text and images only" in str(error)

    @pytest.mark.parametrize("role", ["system", "developer", "assistant"])
    def test_roles_without_videos(self, model: Model, role: str):
        error = refusal(model.chat, video_part(FILM), role=role)
        assert error.param == "messages[0].content"
        assert f"has a video, and a message of the role '{role}' has text only" in str(error)

    @pytest.mark.parametrize(
        ("url", "code", "text"),
        [
            ("data:video/mp4,abc", "invalid_video_url", "video 1 is a data URL without ';base64,'"),
            ("data:video/mp4;base64,AAA", "invalid_video_url", "video 1 is not valid base64"),
            ("data:video/jpeg;base64,AAAA,!!!!", "invalid_video_url", "is not valid base64"),
            ("data:video/jpeg;base64,", "invalid", "video 1"),
            (data_url(b"no video"), "invalid_video", "video 1"),
            (data_url(film(8)[:300]), "invalid_video", "video 1"),
            (data_url(b"#EXTM3U\nfile:///etc/passwd\n"), "invalid_video", "video 1"),
            ("file:///etc/passwd", "invalid_video_url", "it must begin with data:"),
            (URL, "invalid_video_url", "this server fetches no videos (images.domains)"),
        ],
    )
    def test_urls(self, model: Model, url: str, code: str, text: str):
        error = refusal(model.chat, image_part(png(4, 4)), video_part(url))
        assert error.param == "messages"
        assert (error.code or "").startswith(code)
        assert text in str(error)

    def test_limits(self, model: Model):
        parts = [video_part(frames_url(4, seed=seed)) for seed in range(3)]
        error = refusal(model.chat, *parts, max_per_request=2, granted=Grant.text)
        assert error.code == "too_many_videos"
        assert "3 videos, and video.max_per_request allows 2" in str(error)
        error = refusal(model.chat, video_part(FILM), max_mib=0.001)
        assert "video.max_mib allows 1048" in str(error)
        error = refusal(model.chat, video_part(FILM), images={"max_pixels": 200})
        assert "images.max_pixels" in str(error)
        assert len(model.chat(*parts, model={"media_cache_tokens": 96}).images) == 6
        error = refusal(model.chat, *parts, model={"media_cache_tokens": 95})
        assert "images.cache_tokens" in str(error)

    @pytest.mark.parametrize("text", [VIDEO, SHOWN, f"see {VIDEO} here"])
    def test_the_placeholder_in_a_text(self, model: Model, text: str):
        for parts in ([text_part(text), video_part(frames_url(2))], [text_part(text)]):
            assert refusal(model.chat, *parts).param == "messages"

    @pytest.mark.parametrize(
        ("name", "value"),
        [("truncate_prompt_tokens", 5), ("prompt_logprobs", 0), ("return_token_offsets", True)],
    )
    def test_fields_that_need_text(self, model: Model, name: str, value: Any):
        error = refusal(model.chat, video_part(frames_url(2)), fields={name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert "cannot be combined with images, videos and audio" in str(error)


class TestAnyUrl:
    @settings(max_examples=150, deadline=None)
    @given(
        st.sampled_from(
            ["data:", "data:video/mp4;base64,", "data:video/jpeg;base64,", "http:", ""]
        ),
        st.one_of(
            st.text(max_size=30),
            st.lists(st.binary(max_size=20).map(base64_text), max_size=4).map(",".join),
            st.binary(max_size=200).map(lambda data: base64_text(film(8) + data)),
            st.integers(0, 1500).map(lambda size: base64_text(film(8)[:size])),
        ),
    )
    def test_a_url_is_a_video_or_refused(self, model: Model, head: str, rest: str):
        try:
            generation = model.chat(video_part(head + rest))
        except InvalidRequestError as error:
            refused = error
        else:
            assert generation.images
            return
        assert (refused.status, refused.param) == (400, "messages")
        assert "video 1" in str(refused)


class TestWhereItRuns:
    @pytest.mark.parametrize(
        ("parts", "fields", "needed"),
        [
            ([text_part("video still"), image_part(png(4, 4))], {}, Grant.images),
            ([video_part(FILM), text_part("a")], {}, Grant.videos),
            ([video_part(FILM), image_part(png(4, 4))], {}, Grant.videos),
            ([image_part(png(4, 4)), video_part(FILM)], {"chat_template": "a"}, Grant.videos),
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
        assert model.chat(text_part("a"), granted=Grant.text).images == []

    def test_each_video_has_a_limit_of_processor_time(self, model: Model):
        model.parts.clear()
        parts = [video_part(frames_url(2)), image_part(png(4, 4)), video_part(frames_url(2))]
        model.chat(*parts, max_frames=100)
        limits = [part for part in model.parts if part[0].startswith("messages:")]
        assert limits == [
            ("messages: video 1", 160.0),
            ("messages: image 1", 20.0),
            ("messages: video 2", 160.0),
        ]

    def test_urls_must_be_fetched_first(self, model: Model):
        image_url = "https://media.test/a.png"
        parts = [
            {"type": "image_url", "image_url": image_url},
            *(video_part(url) for url in (URL, FILM, URL)),
        ]
        values = {"images": {"domains": ["media.test"]}, "max_frames": 4}
        for granted in (Grant.text, Grant.videos):
            with pytest.raises(FetchNeededError) as needed:
                model.chat(*parts, **values, granted=granted)
            assert needed.value.wanted == {
                image_url: FetchWanted("messages: image 1", MediaKind.image),
                URL: FetchWanted("messages: video 1", MediaKind.video),
            }
        fetched = {URL: film(9, seed=2), image_url: png(8, 4)}
        generation = model.chat(*parts, **values, fetched=fetched)
        assert [(one.num_frames, one.num_tokens) for one in generation.images] == [
            (1, 2),
            *[(2, 16)] * 6,
        ]
