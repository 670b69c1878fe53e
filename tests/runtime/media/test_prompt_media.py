"""The media of a prompt: limits, URLs, and their order."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.audio.sound_sources import GivenSamples, SoundSource
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_sources import ImageSource
from ostinato.runtime.media.prompt_media import (
    FetchWanted,
    MediaLimits,
    MediaSource,
    PreparedMedium,
    check_media,
    prepare_media,
    urls_to_fetch,
)
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.video.video_sources import FrameSampling, GivenFrames, VideoSource
from tests.api.media.sound_apps import audio_url, noise, served_sounds, sound_spec, wav
from tests.runtime.video.video_files import encode, film, small_spec, spec_3, with_times

PARAM = "messages"
FILM = encode(film(10))
NO_VIDEO = msgspec.structs.replace(small_spec(), video=None)


def limits(**fields: Any) -> MediaLimits:
    """The default limits; `video_...` and `audio_...` are those of these sections."""

    def section(name: str) -> dict[str, Any]:
        keys = [key for key in fields if key.startswith(name)]
        return {key.removeprefix(name): fields.pop(key) for key in keys}

    video, audio = section("video_"), section("audio_")
    return MediaLimits(ImagesConfig(**fields), VideoConfig(**video), AudioConfig(**audio))


def model(spec: ImageSpec | None = None, num_tokens: int = 1 << 16) -> ServedModel:
    return ServedModel(
        name="vision", max_model_len=99, vocab_size=99, eos_token_ids=(), tokenizer="",
        images=spec, media_cache_tokens=num_tokens,
    )  # fmt: skip


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(seed: int = 0, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(film(9, 16, 16)[seed]).save(out, kind)
    return out.getvalue()


def film_source(**fields: Any) -> VideoSource:
    return VideoSource(url=data_url(FILM, "video/mp4"), **fields)


def image_source(seed: int = 0) -> ImageSource:
    return ImageSource(url=data_url(picture(seed), "image/png"))


def prepare(
    sources: list[MediaSource],
    spec: ImageSpec,
    fetched: dict[str, bytes] | None = None,
    num_tokens: int = 1 << 16,
    **fields: Any,
) -> list[PreparedMedium]:
    served = model(spec, num_tokens)
    check_media(sources, served, limits(**fields), param=PARAM)
    return prepare_media(sources, served, limits(**fields), param=PARAM, fetched=fetched or {})


def refused(function: Any, *arguments: Any, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        function(*arguments, **fields)
    assert caught.value.status == 400
    assert caught.value.param == PARAM
    return caught.value


def test_the_order_is_that_of_the_prompt():
    sources = [image_source(1), film_source(), image_source(5), film_source()]
    begun: list[tuple[str, str]] = []
    found = prepare_media(
        sources, model(small_spec()), limits(), param=PARAM, fetched={},
        begin=lambda name, kind: begun.append((name, kind)),
    )  # fmt: skip
    assert [medium.kind for medium in found] == ["image", "video"] * 2
    assert found[1] == found[3]
    assert found[0] != found[2]
    assert [image.num_frames for image in (*found[0].parts, *found[1].parts)] == [1, 2, 2]
    assert begun == [
        ("messages: image 1", "image"),
        ("messages: video 1", "video"),
        ("messages: image 2", "image"),
        ("messages: video 2", "video"),
    ]


@pytest.mark.parametrize("spec", [small_spec(), small_spec(spec_3())])
def test_all_sources_of_a_video_give_the_same(spec: ImageSpec, tmp_path: Path):
    (tmp_path / "film.mp4").write_bytes(FILM)
    url = "https://a.test/film.mp4"
    sampling = FrameSampling(num_frames=4)
    sources: list[MediaSource] = [
        film_source(sampling=sampling),
        VideoSource(file=FILM, sampling=sampling),
        VideoSource(file=tmp_path / "film.mp4", sampling=sampling),
        VideoSource(url=url, sampling=sampling),
    ]
    found = prepare(sources, spec, {url: FILM}, domains=["a.test"])
    assert len(found[0].parts) == 2
    assert all(one == found[0] for one in found)
    assert found[0].text.count("seconds") == (2 if spec.video and spec.video.states_times else 0)


def test_frames_as_jpeg_files():
    files = [picture(seed, "JPEG") for seed in range(5)]
    first, *others = (data_url(file, "video/jpeg") for file in files)
    url = ",".join([first, *(one.partition(",")[2] for one in others)])
    spec = small_spec(spec_3())
    (one,) = prepare([VideoSource(url=url)], spec)
    frames = np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])
    (given,) = prepare([VideoSource(frames=GivenFrames(frames, fps=1.0))], spec)
    assert one == given
    assert one.text == with_times("<0.5 seconds>", "<2.5 seconds>", "<4.0 seconds>")
    for broken, code in (
        (url.replace("video/jpeg", "video/mp4"), "invalid_video_url"),
        (f"{url},", "invalid_video"),
        (f"{url},AAAA", "invalid_video"),
        (f"{url},%", "invalid_video_url"),
        (first.partition(",")[0] + ",", "invalid_video"),
    ):
        error = refused(prepare, [VideoSource(url=broken)], spec)
        assert (error.code, str(error).startswith("messages: video 1")) == (code, True)
    for sampling_param in ("", "media_io_kwargs.video"):
        source = VideoSource(url=url, sampling=FrameSampling(num_frames=5))
        with pytest.raises(InvalidRequestError) as caught:
            check_media([source], model(spec), limits(), param=PARAM, sampling_param=sampling_param)
        assert caught.value.param == (sampling_param or PARAM)
        assert "JPEG files, which are all used, so num_frames=5 cannot" in str(caught.value)
        assert "leave num_frames out, or send a video file" in str(caught.value)
    (faster,) = prepare([VideoSource(url=url, sampling=FrameSampling(fps=2.0))], spec)
    assert "<1.2 seconds>" in faster.text
    error = refused(prepare, [VideoSource(url=url)], spec, video_max_frames=4)
    assert "has 5 frames, and video.max_frames allows 4" in str(error)
    size = sum(map(len, files))
    error = refused(prepare, [VideoSource(url=url)], spec, video_max_mib=size / 2 / 2**20)
    assert "video.max_mib allows" in str(error)


def test_models_that_take_none():
    for spec, text in ((None, "takes no videos; send text only"),
                       (NO_VIDEO, "takes no videos; send text and images only")):  # fmt: skip
        error = refused(check_media, [film_source()], model(spec), limits(), param=PARAM)
        assert (str(error), error.code) == (f"messages: vision {text}", "unsupported_parameter")
    error = refused(
        check_media, [film_source(), image_source()], model(None), limits(), param=PARAM
    )
    assert "takes no images; send text only" in str(error)
    error = refused(
        check_media, [film_source()], model(None), limits(max_per_request=0), param=PARAM
    )
    assert "takes no videos (images.max_per_request is 0); send text only" in str(error)
    check_media([], model(None), limits(), param=PARAM)
    check_media([image_source()], model(NO_VIDEO), limits(), param=PARAM)


def test_too_many():
    served = model(small_spec())
    most = limits(max_per_request=2, video_max_per_request=1)
    check_media([image_source(), film_source(), image_source()], served, most, param=PARAM)
    error = refused(check_media, [image_source()] * 3, served, most, param=PARAM)
    assert "has 3 images, and images.max_per_request allows 2" in str(error)
    assert error.code == "too_many_images"
    error = refused(check_media, [film_source()] * 2, served, most, param=PARAM)
    assert "has 2 videos, and video.max_per_request allows 1; send fewer" in str(error)
    assert error.code == "too_many_videos"
    none = limits(video_max_per_request=0)
    assert "video.max_per_request allows 0" in str(
        refused(check_media, [film_source()], model(NO_VIDEO), none, param=PARAM)
    )


def test_frames_that_a_request_cannot_have():
    sources = [film_source(), film_source(sampling=FrameSampling(num_frames=33))]
    error = refused(check_media, sources, model(small_spec()), limits(), param=PARAM)
    assert str(error).startswith("messages: video 2: num_frames=33 must be from 1 to 32")
    check_media(sources, model(small_spec()), limits(video_max_frames=33), param=PARAM)
    with pytest.raises(InvalidRequestError) as caught:
        check_media(
            sources, model(small_spec()), limits(), param=PARAM, sampling_param="media_io_kwargs"
        )
    assert caught.value.param == "media_io_kwargs"


def test_the_embeddings_of_all_together_are_limited():
    sources = [image_source(), film_source(), image_source()]
    found = prepare(sources, small_spec())
    counts = [sum(image.num_tokens for image in medium.parts) for medium in found]
    assert prepare(sources, small_spec(), num_tokens=sum(counts)) == found
    error = refused(prepare, sources, small_spec(), num_tokens=sum(counts) - 1)
    assert f"the first 3 images and videos have {sum(counts)} embeddings" in str(error)
    assert error.code == "too_many_embeddings"
    error = refused(prepare, sources, small_spec(), num_tokens=sum(counts[:2]) - 1)
    assert f"the request can have {counts[1] - 1} more" in str(error)
    error = refused(prepare, sources[:1], small_spec(), num_tokens=counts[0] - 1)
    assert f"the first 1 images have {counts[0]} embeddings" in str(error)


def test_videos_that_last_too_long_for_the_positions_in_time():
    """Two pairs, one minute apart. Qwen2.5-VL has four positions for each second."""
    spec = small_spec(positions_per_second=4.0)
    for seconds, is_served in ((60.0, True), (9000.0, False)):
        frames = GivenFrames(film(4, 16, 16), fps=2 / seconds)
        if is_served:
            (medium,) = prepare([VideoSource(frames=frames)], spec)
            assert medium.parts[1].time_offset == 4 * seconds
        else:
            error = refused(prepare, [VideoSource(frames=frames)], spec)
            assert error.code == "video_too_long"
            assert "at most 32768 are possible; send shorter videos" in str(error)


def test_the_urls_of_images_and_videos():
    allowed = limits(domains=["a.test"])
    sources: list[MediaSource] = [
        image_source(),
        VideoSource(url="https://a.test/film"),
        ImageSource(url="https://a.test/picture"),
        film_source(),
        VideoSource(url="https://a.test/film"),
        VideoSource(file=FILM),
        VideoSource(frames=GivenFrames(film(2))),
        ImageSource(url="https://a.test/both"),
        VideoSource(url="https://a.test/both"),
    ]
    assert urls_to_fetch(sources, allowed, param=PARAM) == {
        "https://a.test/film": FetchWanted("messages: video 1", MediaKind.video),
        "https://a.test/picture": FetchWanted("messages: image 2", MediaKind.image),
        # An animation can be an image and a video.
        "https://a.test/both": FetchWanted("messages: image 3", MediaKind.video),
    }
    error = refused(urls_to_fetch, [VideoSource(url="http://b.test/x")], allowed, param=PARAM)
    assert "fetches no videos (images.domains); send the video as data:video/mp4" in str(error)
    assert error.code == "invalid_video_url"
    for url in ("film.mp4", ""):
        error = refused(urls_to_fetch, [VideoSource(url=url)], allowed, param=PARAM)
        assert error.code == "invalid_video_url"
        error = refused(urls_to_fetch, [ImageSource(url=url)], allowed, param=PARAM)
        assert error.code == "invalid_image_url"


def test_errors_name_the_field_the_video_and_the_setting():
    error = refused(prepare, [film_source()], small_spec(), video_max_mib=1e-6)
    assert "messages: video 1 has" in str(error)
    assert "video.max_mib allows 1; send a smaller video" in str(error)
    error = refused(prepare, [VideoSource(url="data:video/mp4,x")], small_spec())
    assert "write data:video/mp4;base64,DATA" in str(error)
    error = refused(prepare, [VideoSource(file=b"x")], small_spec())
    assert (error.code, error.param) == ("invalid_video", PARAM)


def sound_source(seed: int = 0) -> SoundSource:
    return SoundSource(url=audio_url(wav(0.4, seed)))


def test_sounds(tmp_path: Path):
    (tmp_path / "a.wav").write_bytes(wav(0.4))
    served = served_sounds(tmp_path, sound_spec(9), media_cache_tokens=50)
    url = "https://a.test/a.wav"
    sources = [
        sound_source(),
        SoundSource(url=url),
        SoundSource(file=wav(0.4)),
        SoundSource(file=tmp_path / "a.wav"),
        SoundSource(samples=GivenSamples(noise(0.4))),
    ]
    allowed = limits(domains=["a.test"])
    check_media(sources, served, allowed, param=PARAM)
    assert urls_to_fetch(sources, allowed, param=PARAM) == {
        url: FetchWanted("messages: sound 2", MediaKind.sound)
    }
    begun: list[tuple[str, str]] = []
    found = prepare_media(
        sources, served, allowed, param=PARAM, fetched={url: wav(0.4)},
        begin=lambda name, kind: begun.append((name, kind)),
    )  # fmt: skip
    assert begun == [(f"messages: sound {number}", "sound") for number in range(1, 6)]
    assert all(one == found[0] for one in found)
    assert (found[0].kind, [part.num_tokens for part in found[0].parts]) == ("sound", [10])
    small = msgspec.structs.replace(served, media_cache_tokens=49)
    error = refused(prepare_media, sources, small, allowed, param=PARAM, fetched={url: wav(0.4)})
    assert "the first 5 sounds have 50 embeddings, and a request can have 49" in str(error)
    error = refused(check_media, sources, served, limits(audio_max_per_request=4), param=PARAM)
    assert "has 5 sounds, and audio.max_per_request allows 4; send fewer" in str(error)
    assert error.code == "too_many_sounds"
    error = refused(
        prepare_media,
        [sound_source()],
        served,
        limits(audio_max_mib=0.001),
        param=PARAM,
        fetched={},
    )
    assert "messages: sound 1 has 12878 bytes, and audio.max_mib allows 1048" in str(error)
    none = limits(domains=["b.test"])
    assert "sound 2 is at the host 'a.test'" in str(
        refused(urls_to_fetch, sources, none, param=PARAM)
    )


def test_models_that_take_no_sounds(tmp_path: Path):
    listener = served_sounds(tmp_path, sound_spec(9))
    for sources, served, text in (
        ([sound_source()], model(), "vision takes no sounds; send text only"),
        ([sound_source()], model(NO_VIDEO), "vision takes no sounds; send text and images only"),
        ([image_source()], listener, "listener takes no images; send text and sounds only"),
        ([film_source(), sound_source()], listener, "listener takes no videos; send text and"),
    ):
        error = refused(check_media, sources, served, limits(), param=PARAM)
        assert text in str(error)
        assert error.code == "unsupported_parameter"
    error = refused(
        check_media, [sound_source()], model(), limits(audio_max_per_request=0), param=PARAM
    )
    assert "takes no sounds (audio.max_per_request is 0); send text only" in str(error)
