"""Videos that Python programs give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.video.offline_videos import video_list, video_of_part
from ostinato.runtime.video.video_sources import FrameSampling, GivenFrames, VideoSource
from tests.runtime.video.video_files import film

FRAMES = film(4, 16, 8)
PICTURES = [Image.fromarray(frame) for frame in FRAMES]
PLACE = "messages[0].content[1]"


def given(source: VideoSource) -> GivenFrames:
    assert source.frames is not None
    return source.frames


def refused(function: Any, *arguments: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        function(*arguments)
    assert caught.value.status == 400
    return caught.value


def test_one_video_or_several():
    for value in (FRAMES, PICTURES, torch.from_numpy(FRAMES), (FRAMES, {}), [FRAMES], [PICTURES]):
        (one,) = video_list(value, "video")
        assert np.array_equal(np.stack([np.asarray(frame) for frame in given(one).frames]), FRAMES)
        assert given(one)[1:] == (None, (), None)
    for value in (
        [FRAMES, PICTURES],
        np.stack([FRAMES, FRAMES]),
        [b"x", Path("/x")],
        [(FRAMES, {})] * 2,
    ):
        assert len(video_list(value, "video")) == 2
    assert video_list([], "video") == []
    assert video_list([b"x", bytearray(b"y"), Path("/z")], "video") == [
        VideoSource(file=b"x"), VideoSource(file=b"y"), VideoSource(file=Path("/z")),
    ]  # fmt: skip


def test_the_metadata_of_vllm():
    metadata = {
        "total_num_frames": 120,
        "fps": 30,
        "duration": 4.0,
        "video_backend": "opencv",
        "frames_indices": [0, 30, 60, 90],
        "do_sample_frames": False,
    }
    (one,) = video_list((FRAMES, metadata), "video")
    assert given(one)[1:] == (30.0, (0, 30, 60, 90), 120)
    (one,) = video_list((FRAMES, {**metadata, "frames_indices": np.arange(4)}), "video")
    assert given(one)[1:] == (30.0, (0, 1, 2, 3), 120)
    (one,) = video_list((PICTURES, {"fps": 2}), "video")
    assert given(one)[1:] == (2.0, (), None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "must be an array of frames, a list of images of Pillow"),
        ("film.mp4", "got str"),
        ([[1, 2]], "got list"),
        (PICTURES[0], "got Image"),
        (FRAMES[0], "shape [8, 16, 3] of uint8"),
        (FRAMES.astype(np.float32), "of float32; it must be [frames, height, width, 3] of uint8"),
        (FRAMES.transpose(0, 3, 1, 2), "shape [4, 3, 8, 16]"),
        (FRAMES[:0], "shape [0, 8, 16, 3]"),
        ((FRAMES,), "must be (frames, metadata) if it is a tuple"),
        ((FRAMES, 2.0), "must be (frames, metadata)"),
        ((FRAMES, {"rate": 2}), "metadata 'rate', which are not supported"),
        ((FRAMES, {"do_sample_frames": True}), "do_sample_frames=True"),
        ((FRAMES, {"fps": "2"}), "fps must be a number, got '2'"),
        ((FRAMES, {"fps": True}), "fps must be a number"),
        ((FRAMES, {"fps": float("nan")}), "fps must be a number"),
        ((FRAMES, {"fps": 0}), "fps=0 must be above 0 and at most 1000"),
        ((FRAMES, {"fps": -1}), "fps=-1 must be"),
        ((FRAMES, {"fps": 1e-6}), "longer than 86400 s"),
        ((FRAMES, {"frames_indices": [0, 1]}), "must have 4 integers from 0, one for each frame"),
        ((FRAMES, {"frames_indices": [0, 1, 2, "3"]}), "must have 4 integers"),
        ((FRAMES, {"frames_indices": 5}), "must have 4 integers"),
        ((FRAMES, {"frames_indices": [0, 1, 2, 2.5]}), "must have 4 integers"),
        ((FRAMES, {"frames_indices": [-1, 1, 2, 3]}), "must have 4 integers from 0"),
        ((FRAMES, {"frames_indices": [3, 2, 1, 0]}), "must be sorted"),
        (
            (FRAMES, {"frames_indices": [0, 1, 2, 3], "total_num_frames": 3}),
            "total_num_frames=3 must be above frames_indices, which go to 3",
        ),
        ((FRAMES, {"total_num_frames": 4.5}), "total_num_frames must be an integer"),
    ],
)
def test_videos_that_are_refused(value: Any, text: str):
    error = refused(video_list, value, "multi_modal_data.video")
    assert text in str(error)
    assert str(error).startswith("multi_modal_data.video")
    assert (error.param, error.code) == ("multi_modal_data.video", "invalid_video")


def test_parts():
    url = "data:video/mp4;base64,AAAA"
    assert video_of_part({"type": "video_url", "video_url": url}, PLACE) == VideoSource(url=url)
    part = {"type": "video_url", "video_url": {"url": url}, "uuid": "u", "num_frames": 8}
    assert video_of_part(part, PLACE) == VideoSource(url=url, sampling=FrameSampling(num_frames=8))
    assert video_of_part({"type": "video", "video": url, "fps": 2}, PLACE) == VideoSource(
        url=url, sampling=FrameSampling(fps=2.0)
    )
    source = video_of_part({"type": "video", "video": Path("/x"), "fps": 0.5}, PLACE)
    assert source == VideoSource(file=Path("/x"), sampling=FrameSampling(fps=0.5))
    source = video_of_part({"type": "video", "video": PICTURES}, PLACE)
    assert given(source).frames == PICTURES


@pytest.mark.parametrize(
    ("part", "text", "code"),
    [
        ({"type": "video_url"}, ".video_url must be a URL as text, got NoneType", "invalid_video"),
        ({"type": "video_url", "video_url": b"x"}, "got bytes", "invalid_video"),
        ({"type": "video_url", "video_url": {}}, "got NoneType", "invalid_video"),
        ({"type": "video_url", "video_url": {"url": "x", "detail": "low"}}, "'detail'", "unknown_parameter"),
        ({"type": "video", "video": "x", "nframes": 3}, "'nframes'", "unknown_parameter"),
        ({"type": "video", "video_url": "x"}, "'video_url'", "unknown_parameter"),
        ({"type": "video", "video": FRAMES, "fps": 2}, "choose frames of a file", "invalid_video"),
        ({"type": "video", "video": "x", "fps": "2"}, ".fps must be a number", "invalid_video"),
        ({"type": "video", "video": "x", "num_frames": 2.0}, "an integer", "invalid_video"),
    ],
)  # fmt: skip
def test_parts_that_are_refused(part: dict[str, Any], text: str, code: str):
    error = refused(video_of_part, part, PLACE)
    assert text in str(error)
    assert str(error).startswith(PLACE)
    assert error.code == code
