"""Pairs of frames: their sizes, pixels, positions and times."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    smart_resize as smart_resize_2,  # the video processor has a copy of it, and needs torchvision
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    smart_resize as smart_resize_3,
)

from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.patch_grid import split_patches
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.images import PreparedImages, PromptImage, image_digest
from ostinato.runtime.video.prepare_video import frame_size
from ostinato.runtime.video.video_inputs import VideoContent, check_sampling, prepare_video
from ostinato.runtime.video.video_sources import FrameSampling, GivenFrames
from tests.runtime.video.video_files import (
    NAME,
    Frames,
    decoded_by_pyav,
    encode,
    film,
    noise,
    small_spec,
    spec_2,
    spec_2_5,
    spec_3,
    with_times,
)

edges = st.integers(1, 3000)
# Numbers of frames up to the one that settings allow; 1 is a pair of equal frames.
numbers = st.integers(2, 768)


def prepare(
    content: VideoContent,
    spec: ImageSpec | None = None,
    sampling: FrameSampling = FrameSampling(),  # noqa: B008
    *,
    max_tokens: int = 10**9,
    images: dict[str, Any] | None = None,
    **config: Any,
) -> PreparedImages:
    return prepare_video(
        content,
        sampling,
        spec or small_spec(),
        ImagesConfig(**(images or {})),
        VideoConfig(**config),
        NAME,
        max_tokens=max_tokens,
    )


def refused(code: str, *arguments: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        prepare(*arguments, **fields)
    assert (caught.value.code, caught.value.status) == (code, 400)
    assert str(caught.value).startswith(NAME)
    return str(caught.value)


def pixels_of(pair: PromptImage) -> Frames:
    """[2, height, width, 3]."""
    return np.frombuffer(pair.pixels, np.uint8).reshape(pair.shape)


@given(edges, edges, numbers)
def test_sizes_of_qwen2(height: int, width: int, num_frames: int):
    spec = spec_2()
    assume(max(height, width) <= 200 * min(height, width))
    assert spec.video is not None
    expected = smart_resize_2(height, width, 28, spec.video.min_pixels, spec.video.max_pixels)
    assert frame_size(height, width, num_frames, spec, NAME) == expected


@given(edges, edges, numbers)
def test_sizes_of_qwen3(height: int, width: int, num_frames: int):
    """The limits are those of all frames together. Very small frames are enlarged first."""
    spec = spec_3()
    assert spec.video is not None
    limits = (spec.video.min_pixels, spec.video.max_pixels)
    try:
        expected = smart_resize_3(num_frames, height, width, 2, 32, *limits)
    except ValueError:
        with pytest.raises(InvalidRequestError, match="200 times the shorter one"):
            frame_size(height, width, num_frames, spec, NAME)
    else:
        assert frame_size(height, width, num_frames, spec, NAME) == expected


@given(edges, edges, numbers, st.integers(128 * 32 * 16, 10**6))
def test_the_area_of_one_frame_can_be_limited(height: int, width: int, number: int, most: int):
    """`video.max_resized_pixels` holds for Qwen3-VL too, besides the last rounding."""
    assume(max(height, width) <= 20 * min(height, width))
    spec = spec_3(max_frame_pixels=most)
    new_height, new_width = frame_size(height, width, number, spec, NAME)
    assert new_height * new_width <= max(most, 32 * 32 * 20)


def test_one_frame_is_a_pair():
    assert frame_size(100, 100, 1, spec_3(), NAME) == frame_size(100, 100, 2, spec_3(), NAME)


@settings(max_examples=20, deadline=None)
@given(st.integers(20, 300), st.integers(20, 300), st.sampled_from([2, 3]), st.integers(0, 5))
def test_resized_pixels_are_those_of_torch(height: int, width: int, resample: int, seed: int):
    """torchvision's resize, which the processors use, is this function of torch.

    Both round after each axis. A colour between two numbers can be rounded differently both times.
    """
    spec = msgspec.structs.replace(small_spec(), resample=resample)
    frames = noise(2, width, height, seed)
    (pair,) = prepare(GivenFrames(frames), spec).parts
    size = (pair.height, pair.width)
    mode = "bilinear" if resample == 2 else "bicubic"
    planes = torch.from_numpy(frames).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(
        planes, size, mode=mode, align_corners=False, antialias=True
    )
    ours = torch.from_numpy(pixels_of(pair).copy()).permute(0, 3, 1, 2)
    difference = (ours.int() - expected.int()).abs()
    assert difference.max() <= 2
    assert (difference > 1).float().mean() < 1e-4


@pytest.mark.parametrize("number", [2, 5])
def test_patches_are_those_of_transformers(number: int):
    """An odd last frame is repeated. The pairs have the processor's patches, in its order."""
    frames = noise(number, 32, 24)
    prepared = prepare(GivenFrames(frames), small_spec(min_pixels=64, max_pixels=32 * 24))
    assert {(pair.height, pair.width) for pair in prepared.parts} == {(24, 32)}
    videos = torch.from_numpy(frames).permute(0, 3, 1, 2)[None]
    processor: Any = SimpleNamespace()
    expected, steps, rows, columns = Qwen3VLVideoProcessor.patchify(processor, videos, 4, 2, 2)
    assert (steps, rows, columns) == (len(prepared.parts), 6, 8)
    ours = [
        split_patches(torch.from_numpy(pixels_of(pair).copy()), 4, 2) for pair in prepared.parts
    ]
    assert torch.equal(torch.cat(ours), expected[0])


def test_the_fields_of_pairs():
    frames = noise(6, 32, 24)
    for spec, offsets, continued in (
        (spec_2(), [0, 1, 2], [False, True, True]),
        (spec_2_5(), [0, 4, 8], [False, True, True]),  # two positions a second, a pair has two
        (spec_3(), [0, 0, 0], [False, False, False]),
    ):
        prepared = prepare(GivenFrames(frames, fps=1.0), small_spec(spec))
        assert [pair.time_offset for pair in prepared.parts] == offsets
        assert [pair.is_continued for pair in prepared.parts] == continued
        for pair in prepared.parts:
            assert (pair.begin, pair.num_frames, pair.num_bytes) == (0, 2, len(pair.pixels))
            assert pair.digest == image_digest(pair.height, pair.width, pair.pixels)
            assert pair.num_tokens == pair.height * pair.width // 64
        times = ("<0.5 seconds>", "<2.5 seconds>", "<4.5 seconds>")
        assert prepared.text == (
            with_times(*times) if spec.video and spec.video.states_times else ""
        )


@pytest.mark.parametrize("name", ["mp4-h264", "webm-vp9", "avi-h264", "gif"])
def test_frames_of_a_file(name: str):
    """Six frames of two seconds: their pixels, their times, and the positions of these times."""
    data = encode(noise(60, 64, 48), name)
    whole = decoded_by_pyav(data)
    indices = np.linspace(0, 59, 6).round().astype(int)
    spec = small_spec(spec_3(), max_pixels=6 * 64 * 48)
    prepared = prepare(data, spec, FrameSampling(num_frames=6))
    again = prepare(GivenFrames(np.stack([whole[index] for index in indices])), spec)
    assert [pair.pixels for pair in prepared.parts] == [pair.pixels for pair in again.parts]
    means = [(indices[at] + indices[at + 1]) / 2 / 30 for at in (0, 2, 4)]
    assert prepared.text == with_times(*(f"<{mean:.1f} seconds>" for mean in means))
    in_time = prepare(data, small_spec(spec_2_5()), FrameSampling(num_frames=6))
    interval = 2.0 * 2 / (6 / 60 * 30)
    assert [pair.time_offset for pair in in_time.parts] == [int(interval * at) for at in range(3)]


def test_the_number_of_frames_follows_request_setting_and_spec():
    data = encode(film(90), "mp4-mpeg4")  # three seconds

    def count(sampling: FrameSampling = FrameSampling(), **config: Any) -> int:  # noqa: B008
        return len(prepare(data, small_spec(), sampling, **config).parts)

    assert count() == 3  # two frames a second
    assert count(fps=4.0) == 6
    assert count(FrameSampling(fps=8.0), fps=4.0) == 12
    assert count(FrameSampling(num_frames=10), fps=4.0) == 5
    assert count(FrameSampling(fps=60.0)) == 16  # video.max_frames
    assert count(FrameSampling(fps=60.0), max_frames=90) == 45
    assert count(FrameSampling(num_frames=1)) == 1
    assert count(fps=0.1) == 2  # at least four frames


def jpegs(frames: Frames) -> list[bytes]:
    files: list[bytes] = []
    for frame in frames:
        out = io.BytesIO()
        Image.fromarray(frame).save(out, "JPEG", quality=95)
        files.append(out.getvalue())
    return files


def test_jpeg_files():
    files = jpegs(film(5))
    shown = np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])
    for fps in (None, 2.0):
        found = prepare(files, small_spec(spec_3()), FrameSampling(fps=fps))
        again = prepare(GivenFrames(shown, fps=fps or 1.0), small_spec(spec_3()))
        assert found == again
    assert len(found.parts) == 3


def test_given_frames_of_pillow_and_numpy_are_alike():
    frames = film(4)
    pictures = [Image.fromarray(frame) for frame in frames]
    assert prepare(GivenFrames(frames)) == prepare(GivenFrames(pictures))
    part = noise(8, 32, 24)[::2, ::-1]  # not contiguous
    assert prepare(GivenFrames(part)) == prepare(GivenFrames(part.copy()))


def test_the_rate_of_given_frames():
    """Frames 0, 30, 60 and 90 of a video of 120 frames at 30 Hz are one a second."""
    frames, spec = film(4), small_spec(spec_2_5())
    given = GivenFrames(frames, fps=30.0, indices=(0, 30, 60, 90), num_total=120)
    assert prepare(given, spec) == prepare(GivenFrames(frames, fps=1.0), spec)
    given = GivenFrames(frames, fps=30.0, indices=(0, 30, 60, 90), num_total=120)
    assert prepare(given, small_spec(spec_3())).text == with_times("<0.5 seconds>", "<2.5 seconds>")
    # Without a rate, it is the setting's, or that at which the model samples.
    plain = prepare(GivenFrames(frames), spec)
    assert plain == prepare(GivenFrames(frames, fps=2.0), spec)
    assert prepare(GivenFrames(frames), spec, fps=4.0) == prepare(
        GivenFrames(frames, fps=4.0), spec
    )


def test_limits():
    frames = film(8)
    content = GivenFrames(frames)
    assert "8 frames; it must have from 1 to 6" in refused("invalid_video", content, max_frames=6)
    assert "0 frames" in refused("invalid_video", GivenFrames([]))
    assert "frame 1: the image is 64x48" in refused(
        "invalid_video", content, images={"max_pixels": 64 * 48 - 1}
    )
    tokens = sum(pair.num_tokens for pair in prepare(content).parts)
    assert prepare(content, max_tokens=tokens)
    needs = f"have {tokens} embeddings, and the request can have {tokens - 1} more"
    for other in (content, jpegs(frames)):
        message = refused("too_many_embeddings", other, max_tokens=tokens - 1)
        assert needs in message
        assert message.endswith("send fewer or smaller frames")
    message = refused("too_many_embeddings", encode(frames), max_tokens=1)
    assert message.endswith("ask for fewer frames (num_frames)")
    assert "frame 2: the data is not an image" in refused(
        "invalid_video", [*jpegs(frames[:1]), b"x"]
    )
    narrow = np.zeros((2, 1, 300, 3), np.uint8)
    assert "cut the frame" in refused("invalid_video", GivenFrames(narrow))


def test_paths(tmp_path: Any):
    path = tmp_path / "film.mp4"
    data = encode(film(8))
    path.write_bytes(data)
    assert prepare(path) == prepare(data)
    assert "video.max_mib" in refused("video_too_large", path, max_mib=len(data) / 2**20 / 2)
    assert "cannot be read (No such file" in refused("invalid_video", tmp_path / "none.mp4")
    assert "cannot be read" in refused("invalid_video", tmp_path)


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (FrameSampling(num_frames=0), "from 1 to 32 (video.max_frames); ask for more frames"),
        (FrameSampling(num_frames=-1), "num_frames=-1 must be from 1 to 32"),
        (
            FrameSampling(num_frames=33),
            "num_frames=33 must be from 1 to 32 (video.max_frames); ask for fewer frames",
        ),
        (FrameSampling(num_frames=10**9), "num_frames=1000000000"),
        (FrameSampling(fps=0.0), "above 0 and at most 60; ask for another rate, or leave it"),
        (FrameSampling(fps=-1.0), "fps=-1 must be"),
        (FrameSampling(fps=60.5), "fps=60.5 must be"),
        (FrameSampling(fps=float("nan")), "fps=nan must be"),
        (FrameSampling(fps=float("inf")), "fps=inf must be"),
        (FrameSampling(num_frames=4, fps=1.0), "cannot be combined; leave one out"),
    ],
)
def test_what_a_request_cannot_ask_for(sampling: FrameSampling, text: str):
    video = spec_2().video
    assert video is not None
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(sampling, video, VideoConfig(), NAME)
    assert text in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_value")
    check_sampling(FrameSampling(num_frames=32), video, VideoConfig(), NAME)
    check_sampling(FrameSampling(fps=60.0), video, VideoConfig(), NAME)
    check_sampling(FrameSampling(), video, VideoConfig(), NAME)
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(sampling, None, VideoConfig(), NAME)
    assert text in str(caught.value)


def test_a_model_can_allow_fewer_frames_than_the_setting():
    video = spec_2(max_frames=20).video
    with pytest.raises(InvalidRequestError, match=r"from 1 to 20 \(the limit of the model\)"):
        check_sampling(FrameSampling(num_frames=21), video, VideoConfig(), NAME)
    check_sampling(FrameSampling(num_frames=20), video, VideoConfig(), NAME)
    check_sampling(FrameSampling(num_frames=32), None, VideoConfig(), NAME)


def test_base64_of_a_film_is_not_a_film():
    data = base64.b64encode(encode(film(4)))
    assert "cannot be read as a video" in refused("invalid_video", data)
