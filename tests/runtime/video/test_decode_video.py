"""Frames of files: their number, their order, their times, and how they are turned."""

from __future__ import annotations

import contextlib
import io
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.video.decode_video import VideoLimits, VideoReader
from tests.runtime.video.video_files import (
    ENCODINGS,
    FPS,
    NAME,
    NUM_STORED,
    STORED,
    Encoding,
    decoded_by_pyav,
    encode,
    film,
    noise,
)

LIMITS = VideoLimits(max_bytes=1 << 22, max_pixels=1 << 20)
NUM_FRAMES = NUM_STORED
FILES = {name: encode(film(NUM_FRAMES), name) for name in ENCODINGS}
FILES |= {name: path.read_bytes() for name, path in STORED.items()}
WHOLE = {name: decoded_by_pyav(data) for name, data in FILES.items()}


def reader(data: bytes, limits: VideoLimits = LIMITS) -> VideoReader:
    return VideoReader(data, limits, NAME)


def pixels(opened: VideoReader, indices: list[int]) -> dict[int, np.ndarray]:
    found = [(index, np.asarray(picture)) for index, picture in opened.pictures(indices)]
    assert len(found) == len(dict(found)), "each frame comes once"
    return dict(found)


@pytest.mark.parametrize("name", FILES)
def test_number_rate_and_all_frames(name: str):
    opened = reader(FILES[name])
    assert opened.num_frames == NUM_FRAMES == len(WHOLE[name])
    assert opened.fps == pytest.approx(FPS, rel=0.01)  # gif has hundredths of seconds
    found = pixels(opened, list(range(NUM_FRAMES)))
    assert all(np.array_equal(found[index], WHOLE[name][index]) for index in range(NUM_FRAMES))
    brightness = [found[index].mean() for index in range(NUM_FRAMES)]
    assert np.diff(brightness).min() > -2  # codecs are not exact


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=15)
@given(data=st.data())
def test_any_frames_are_those_that_decoding_all_gives(name: str, data: st.DataObject):
    wanted = data.draw(st.lists(st.integers(0, NUM_FRAMES - 1), min_size=1, max_size=5))
    found = pixels(reader(FILES[name]), wanted)
    assert set(found) == set(wanted)
    for index, picture in found.items():
        assert np.array_equal(picture, WHOLE[name][index]), index


def test_parts_without_wanted_frames_are_not_decoded():
    """Frame 41 needs a few frames after its key frame, not the 40 before it."""
    opened = reader(FILES["mp4-h264"])
    order = opened._order
    assert order is not None
    needed = opened._needed([41], order)
    assert 1 <= sum(needed) <= 12
    assert not any(needed[:30])
    needed = opened._needed([0, 41], order)
    assert needed[0]
    assert not any(needed[5:30])


def test_frames_before_the_key_frame_that_stands_before_them():
    """With an open GOP, frames refer to the key frame before and to the one after them."""
    how = Encoding("mp4", "libx264", options={"x264-params": "open-gop=1:bframes=3:log-level=none"})
    data = encode(noise(60, 64, 48), how)
    whole = decoded_by_pyav(data)
    opened = reader(data)
    assert opened.num_frames == len(whole)
    for index in range(0, 60, 7):
        assert np.array_equal(pixels(opened, [index])[index], whole[index]), index


@pytest.mark.parametrize("fps", [1, 24, 25, Fraction(30000, 1001), 60, 120, Fraction(1, 3)])
@pytest.mark.parametrize("name", ["mp4-h264", "mkv-h264", "webm-vp9"])
def test_rates(name: str, fps: int | Fraction):
    assert reader(encode(film(9), name, fps=fps)).fps == pytest.approx(float(fps), rel=1e-3)


@pytest.mark.parametrize("name", ["mp4-h264", "mkv-h264", "webm-vp9"])
@settings(max_examples=10)
@given(gaps=st.lists(st.integers(1, 40), min_size=2, max_size=12))
def test_variable_rates(name: str, gaps: list[int]):
    times = [sum(gaps[:index]) for index in range(len(gaps) + 1)]
    opened = reader(encode(film(len(times)), name, times=times))
    assert opened.num_frames == len(times)
    # How long the last frame is shown is not always stated.
    seconds = len(times) / opened.fps
    assert times[-1] / FPS - 0.02 <= seconds <= times[-1] / FPS + 41 / FPS + 0.02
    found = pixels(opened, list(range(len(times))))
    brightness = [found[index].mean() for index in range(len(times))]
    assert np.diff(brightness).min() > -2


def test_a_file_without_a_stated_length():
    """A browser that records writes no length and no number of frames, as this muxer does."""
    data = encode(film(20), "webm-vp9", container_options={"live": "1"})
    with av.open(io.BytesIO(data)) as opened:
        assert not opened.duration
        assert not opened.streams.video[0].frames
    opened = reader(data)
    assert (opened.num_frames, opened.fps) == (20, pytest.approx(FPS, rel=0.02))


def test_a_fragmented_mp4():
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    opened = reader(encode(film(30), container_options=options))
    assert (opened.num_frames, opened.fps) == (30, pytest.approx(FPS, rel=0.01))
    assert len(pixels(opened, [0, 15, 29])) == 3


@pytest.mark.parametrize("fields", [b"stts", b"stsz"])
def test_headers_are_not_trusted(fields: bytes):
    """The number of frames that a table of an mp4 file states is made larger."""
    data = bytearray(FILES["mp4-h264"])
    at = data.index(fields) + 12 - 4 * (fields == b"stts")
    data[at : at + 4] = (10**6).to_bytes(4, "big")
    with contextlib.suppress(InvalidRequestError):
        opened = reader(bytes(data))
        assert opened.num_frames <= NUM_FRAMES
        assert pixels(opened, [0, opened.num_frames - 1])


@pytest.mark.parametrize(
    ("width", "height"), [(2, 2), (16, 16), (33, 17), (1, 1), (200, 1), (641, 359)]
)
def test_odd_sizes(width: int, height: int):
    how = Encoding("matroska", "mjpeg", "yuvj444p")
    data = encode(film(3, width, height), how)
    found = pixels(reader(data), [0, 2])
    assert {picture.shape for picture in found.values()} == {(height, width, 3)}


def corners(width: int = 64, height: int = 48) -> np.ndarray:
    """[2, height, width, 3] with a colour in each corner."""
    frame = np.zeros((height, width, 3), np.uint8)
    frame[: height // 2, : width // 2] = (250, 0, 0)
    frame[: height // 2, width // 2 :] = (0, 250, 0)
    frame[height // 2 :, : width // 2] = (0, 0, 250)
    frame[height // 2 :, width // 2 :] = (250, 250, 250)
    return np.stack([frame, frame])


@pytest.mark.parametrize("flips", [False, True])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_frames_are_turned_as_the_file_says(rotation: int, flips: bool):
    frames = corners()
    found = pixels(reader(encode(frames, rotation=rotation, flips=flips)), [0])[0]
    expected = Image.fromarray(frames[0]).rotate(rotation, expand=True)
    flipped = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    first = Image.fromarray(frames[0]).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # FFmpeg's function for a matrix flips before or after it rotates, as its version says.
    allowed = [flipped, first.rotate(rotation, expand=True)] if flips else [expected]
    assert found.shape[:2] == (expected.height, expected.width)
    distances = [np.abs(found.astype(int) - np.asarray(one)).mean() for one in allowed]
    assert min(distances) < 12


def test_other_angles_have_no_effect():
    assert pixels(reader(encode(corners(), rotation=45)), [0])[0].shape == (48, 64, 3)


def test_a_cover_picture_is_not_the_video():
    """The picture of an album is a video stream too, mostly before or after the film."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as opened:
        cover = opened.add_stream("mjpeg", rate=1)
        cover.width = cover.height = 16
        cover.pix_fmt = "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        stream = opened.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
        opened.mux(cover.encode(frame))
        opened.mux(cover.encode(None))
        for image in film(5, 32, 32):
            opened.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        opened.mux(stream.encode(None))
    found = reader(file.getvalue())
    assert found.num_frames == 5
    assert pixels(found, [4])[4].shape == (32, 32, 3)


def test_frames_whose_size_changes():
    """Two films in a row, as some cameras write when they are turned."""
    first, second = (encode(film(4, *size), "mov-mjpeg") for size in ((64, 48), (48, 64)))
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as target:
        stream: object = None
        offset = 0
        for data in (first, second):
            with av.open(io.BytesIO(data)) as source:
                track = source.streams.video[0]
                stream = stream or target.add_stream_from_template(track)
                last = 0
                for packet in source.demux(track):
                    if packet.size:
                        packet.stream = stream  # type: ignore[assignment]
                        packet.pts = packet.dts = (packet.dts or 0) + offset
                        last = packet.dts + (packet.duration or 1)
                        target.mux(packet)
                offset = last
    found = pixels(reader(file.getvalue()), list(range(8)))
    assert [found[index].shape[:2] for index in range(8)] == [(48, 64)] * 4 + [(64, 48)] * 4


def test_indices_beyond_the_file_are_a_fault_of_the_caller():
    with pytest.raises(ValueError, match="from 0 to 46"):
        list(reader(FILES["gif"]).pictures([47]))
    assert list(reader(FILES["gif"]).pictures([])) == []
