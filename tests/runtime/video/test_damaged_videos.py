"""Files that are too large, damaged or of other formats are refused; none opens others."""

from __future__ import annotations

import io
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files import pyav
from ostinato.runtime.video.decode_video import VideoLimits, VideoReader
from ostinato.runtime.video.file_ends import is_cut_short, lacks_seconds
from tests.arch.tree import ROOT
from tests.runtime.audio.audio_files import encode as encode_audio
from tests.runtime.audio.audio_files import tone
from tests.runtime.video.video_files import ENCODINGS, NAME, Encoding, encode, film, noise

LIMITS = VideoLimits(max_bytes=1 << 22, max_pixels=1 << 16)
FILES = {name: encode(noise(25, 64, 48), name) for name in ENCODINGS}
OTHER = {
    "text": b"This is a film.",
    "html": b"<!doctype html><video src=x>",
    "zeros": bytes(1000),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(99),
    "avi": b"RIFF\x24\0\0\0AVI LIST",
    "mp4": b"\0\0\0\x18ftypisom\0\0\x02\0isomiso2",
    "webm": b"\x1aE\xdf\xa3\x9fB\x86\x81\x01",
    "gif": b"GIF89a\x01\0\x01\0\0\0\0;",
    "lavfi": b"testsrc=size=64x48",
    "sdp": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
    b"m=video 5004 RTP/AVP 96\r\n",
}


def decode(data: bytes, limits: VideoLimits = LIMITS) -> int:
    """Decode all frames. Returns their number."""
    opened = VideoReader(data, limits, NAME)
    found = list(opened.pictures(range(opened.num_frames)))
    assert sorted(index for index, _ in found) == list(range(opened.num_frames))
    assert all(picture.width * picture.height <= limits.max_pixels for _, picture in found)
    assert 0 < opened.fps <= 1000
    return len(found)


def code_of(data: bytes) -> str:
    """The code with which a file is refused; "" if it is decoded."""
    try:
        assert decode(data) >= 1
    except InvalidRequestError as error:
        return error.code or "none"
    return ""


def refused(data: bytes, code: str = "invalid_video", limits: VideoLimits = LIMITS) -> str:
    """The message with which a file is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        decode(data, limits)
    error = caught.value
    assert (error.param, error.code, error.status) == ("messages", code, 400)
    assert str(error).startswith(f"{NAME}: ")
    return str(error)


@pytest.mark.parametrize("name", OTHER)
def test_other_data_is_refused(name: str):
    message = refused(OTHER[name])
    assert any(
        text in message
        for text in ("supported formats: mp4, mov, webm, mkv, avi, gif", "no frame can be decoded")
    )


def test_an_empty_file_is_refused():
    assert "the file is empty" in refused(b"")


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mpegts", "mpeg4"), ("flv", "flv"), ("asf", "msmpeg4"), ("nut", "mpeg4")],
)
def test_other_formats_of_ffmpeg_are_refused(container: str, codec: str):
    data = encode(film(25), Encoding(container, codec))
    assert av.open(io.BytesIO(data)).streams.video, "FFmpeg reads it"
    assert "supported formats" in refused(data)


@pytest.mark.parametrize("codec", ["mpeg2video", "msmpeg4", "ffv1", "huffyuv"])
def test_other_codecs_are_refused(codec: str):
    how = Encoding("matroska", codec)
    if codec == "huffyuv":
        how = Encoding("avi", codec, "yuv422p")
    data = encode(film(5), how)
    assert "which is not supported; supported: h264, hevc" in refused(data)


def test_sound_alone_is_refused():
    sound = encode_audio(tone(0.5, 44_100), 44_100, "mp4", "aac")
    assert "no video stream" in refused(sound)


@pytest.mark.parametrize("name", ENCODINGS)
def test_files_that_are_cut_short_are_refused(name: str):
    data = FILES[name]
    assert decode(data) == 25
    for part in (0.3, 0.6, 0.9):
        refused(data[: int(len(data) * part)])
    assert "cut short" in refused(data[:-1])


def test_an_mp4_whose_index_comes_first_and_whose_end_is_missing_is_refused(tmp_path: Path):
    path = tmp_path / "whole.mp4"
    with (
        av.open(io.BytesIO(FILES["mp4-h264"])) as source,
        av.open(str(path), "w", container_options={"movflags": "faststart"}) as target,
    ):
        track = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = track
                target.mux(packet)
    data = path.read_bytes()
    assert decode(data) == 25
    assert data.index(b"moov") < data.index(b"mdat")
    assert "cut short" in refused(data[: len(data) // 2])


def test_files_whose_length_is_not_stated_are_decoded_as_far_as_they_go():
    data = encode(noise(40, 64, 48), "webm-vp8", container_options={"live": "1"})
    assert decode(data) == 40
    assert not is_cut_short(data[:-100], "matroska,webm")
    assert 1 <= decode(data[: len(data) * 3 // 4]) < 40


@given(
    data=st.binary(max_size=200), name=st.sampled_from(["mov,mp4", "matroska,webm", "avi", "gif"])
)
def test_the_ends_of_random_bytes(data: bytes, name: str):
    assert is_cut_short(data, name) in (True, False)


def test_what_follows_the_end_of_a_file_has_no_effect():
    for name in ("mp4-h264", "mkv-h264", "avi-mpeg4", "gif"):
        assert decode(FILES[name] + bytes(64)) == 25, name


def test_too_large_files_are_refused_before_they_are_read():
    message = refused(bytes(1 << 23), "video_too_large")
    assert f"more than the {1 << 22} bytes that are allowed (video.max_mib)" in message


@pytest.mark.parametrize("name", ENCODINGS)
def test_too_large_frames_are_refused_before_they_are_decoded(name: str):
    small = VideoLimits(max_bytes=1 << 22, max_pixels=64 * 48 - 1)
    assert "the frames are 64x48 pixels, but at most 3071" in refused(FILES[name], limits=small)
    decode(FILES[name], VideoLimits(max_bytes=1 << 22, max_pixels=64 * 48))


def test_a_header_does_not_make_frames_smaller():
    """The size in the boxes of an mp4 file is not that of its frames."""
    data = encode(noise(3, 640, 480), "mp4-h264")
    size = struct.pack(">HH", 640, 480)
    assert size in data
    small = data.replace(size, struct.pack(">HH", 16, 16))
    limits = VideoLimits(max_bytes=1 << 22, max_pixels=64 * 64)
    refused(small, limits=limits)


def test_without_the_package_a_video_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pyav, "find_spec", lambda name: None)
    message = refused(FILES["gif"], "missing_package")
    assert 'pip install "ostinato[video]"' in message


def with_zeros(data: bytes, numbers: range) -> bytes:
    """A file in which the content of some packets is lost."""
    changed = bytearray(data)
    with av.open(io.BytesIO(data)) as opened:
        places = [(packet.pos, packet.size) for packet in opened.demux(video=0) if packet.size]
    for begin, size in places[numbers.start : numbers.stop]:
        assert begin is not None
        changed[begin : begin + size] = bytes(size)
    return bytes(changed)


def pictures(data: bytes) -> dict[int, Any]:
    """The pixels of each frame of a file."""
    opened = VideoReader(data, LIMITS, NAME)
    return {
        index: np.asarray(picture).astype(int)
        for index, picture in opened.pictures(range(opened.num_frames))
    }


def differing(found: dict[int, Any], expected: dict[int, Any]) -> list[int]:
    """The frames that are not equal."""
    return [at for at in sorted(expected) if not np.array_equal(found[at], expected[at])]


@pytest.mark.parametrize("name", ["mp4-h264", "mp4-mpeg4", "mov-mjpeg", "avi-mpeg4", "avi-h264"])
def test_damaged_frames(name: str):
    """A few are replaced by others. A file with many is refused."""
    data = encode(noise(60, 64, 48), name)
    assert decode(with_zeros(data, range(30, 31))) == 60
    assert decode(with_zeros(data, range(59, 60))) == 60
    assert "are damaged" in refused(with_zeros(data, range(20, 40)))


@pytest.mark.parametrize("name", ["mp4-still", "mov-mjpeg", "avi-still"])
def test_the_next_good_frame_replaces_a_damaged_one(name: str):
    """No other frame refers to the damaged ones here."""
    stills = {
        "mp4-still": Encoding("mp4", "mpeg4", gop=1),
        "avi-still": Encoding("avi", "mpeg4", gop=1),
        "mov-mjpeg": ENCODINGS["mov-mjpeg"],
    }
    data = encode(noise(60, 64, 48), stills[name])
    whole = pictures(data)
    for numbers, replacement in ((range(1), 1), (range(30, 32), 32), (range(59, 60), 58)):
        found = pictures(with_zeros(data, numbers))
        assert differing(found, whole) == list(numbers)
        for at in numbers:
            assert np.array_equal(found[at], whole[replacement])


def test_damaged_frames_of_matroska():
    """Their contents are lost, and the structure of the file is whole."""
    data = encode(noise(60, 64, 48), Encoding("matroska", "mjpeg", "yuvj420p"))
    whole, damaged = pictures(data), data
    with av.open(io.BytesIO(data)) as opened:
        contents = [bytes(packet) for packet in opened.demux(video=0) if packet.size]
    for content in contents[30:32]:
        assert data.count(content) == 1
        damaged = damaged.replace(content, bytes(len(content)))
    found = pictures(damaged)
    assert differing(found, whole) == [30, 31]
    assert all(np.array_equal(found[at], whole[32]) for at in (30, 31))


@pytest.mark.parametrize("number", [20, 60])
@pytest.mark.parametrize("name", ["mkv-h264", "webm-vp8", "webm-vp9"])
def test_a_damaged_structure_of_matroska(name: str, number: int):
    """The size before a frame is lost, and with it the place of the next frame.

    The frames up to the next cluster are missing. If there is no other cluster, the end is missing,
    and the file is refused.
    """
    data = encode(noise(90, 64, 48), name)
    with av.open(io.BytesIO(data)) as opened:
        places = [packet.pos or 0 for packet in opened.demux(video=0) if packet.size]
    damaged = with_zeros(data, range(number, number + 1))
    cluster = data.find(b"\x1f\x43\xb6\x75", places[number])
    if cluster < 0:
        assert "damaged or cut short" in refused(damaged)
        return
    after = [at for at, place in enumerate(places) if place > cluster]
    assert number < after[0] < 90
    assert decode(damaged) == number + len(after)


@pytest.mark.parametrize("name", ["mkv-h264", "webm-vp8", "webm-vp9"])
def test_a_lost_end_of_matroska(name: str):
    """Up to 0.1 s can be lost: the lengths in headers are not exact."""
    data = encode(noise(90, 64, 48), name)
    assert decode(with_zeros(data, range(88, 89))) == 88
    assert "damaged or cut short" in refused(with_zeros(data, range(85, 86)))


@pytest.mark.parametrize("number", [1, 20, 60, 89])
def test_a_damaged_structure_of_gif(number: int):
    data = encode(noise(90, 64, 48), "gif")
    assert "damaged or cut short" in refused(with_zeros(data, range(number, number + 1)))


@pytest.mark.parametrize(
    ("stated", "end", "longest", "is_short"),
    [
        (3.0, 2.95, 0.03, False),
        (3.0, 2.85, 0.03, True),
        (3.0, 2.85, 0.2, False),  # the last frame may be shown as long as another one
        (100.0, 98.5, 0.03, False),
        (100.0, 97.5, 0.03, True),
        (3.0, 3.5, 0.03, False),
    ],
)
def test_how_much_of_the_end_may_be_missing(
    stated: float, end: float, longest: float, is_short: bool
):
    assert lacks_seconds(stated, end, longest) == is_short


def test_slow_and_uneven_files_of_matroska_are_whole():
    """Their last packets do not say how long the last frame is shown."""
    for name in ("webm-vp8", "webm-vp9", "mkv-h264"):
        assert decode(encode(noise(5, 64, 48), name, fps=1)) == 5
        assert decode(encode(noise(5, 64, 48), name, times=[0, 1, 50, 51, 90])) == 5


_MEASURE = """
import resource, sys
from ostinato.runtime.video.decode_video import *
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.pyav import import_av
from tests.runtime.video.video_files import encode, film

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

limits = VideoLimits(max_bytes=1 << 22, max_pixels=640 * 480)
def decode(data):
    opened = VideoReader(data, limits, "x")
    for _ in opened.pictures(range(0, opened.num_frames, 10)):
        pass

decode(encode(film(3, 640, 480)))
data = encode(film(400, 640, 480))
before = peak()
decode(data)
print(peak() - before)
"""


def test_a_long_video_takes_little_memory():
    """400 frames of 640 x 480 pixels have 369 MB; one of them and those of the decoder are kept."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert int(done.stdout.split()[-1]) < 60_000  # KiB


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{url}'\n",
    "dash": (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        'mediaPresentationDuration="PT4S"><Period><AdaptationSet mimeType="video/mp4">'
        '<Representation id="1" bandwidth="9"><BaseURL>{url}</BaseURL>'
        "</Representation></AdaptationSet></Period></MPD>"
    ),
}


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_opens_no_file(kind: str, tmp_path: Path):
    """The file that it names is a pipe, so opening it for reading would let a writer open it."""
    pipe = tmp_path / "secret.mp4"
    os.mkfifo(pipe)
    for url in (str(pipe), f"file://{pipe}", f"file:{pipe}"):
        assert "supported formats" in refused(PLAYLISTS[kind].format(url=url).encode())
        with pytest.raises(OSError, match="No such device"):  # no process has it open for reading
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_makes_no_connection(kind: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        for scheme in ("http", "tcp", "ftp"):
            url = f"{scheme}://127.0.0.1:{port}/secret.mp4"
            refused(PLAYLISTS[kind].format(url=url).encode())
        with pytest.raises(TimeoutError):
            server.accept()


def test_an_mp4_that_refers_to_another_file_does_not_open_it(tmp_path: Path):
    """A track's data can be in another file, which its data reference names."""
    pipe = tmp_path / "secret.mp4"
    os.mkfifo(pipe)
    data = FILES["mp4-h264"]
    own = b"\0\0\0\x0curl \0\0\0\x01"
    assert own in data
    name = str(pipe).encode() + b"\0"
    other = struct.pack(">I", 12 + len(name)) + b"url \0\0\0\0" + name
    changed = data.replace(own, other)
    for kind in (b"dref", b"dinf", b"minf", b"mdia", b"trak", b"moov"):
        at = changed.index(kind) - 4
        size = int.from_bytes(changed[at : at + 4], "big") + len(other) - len(own)
        changed = changed[:at] + struct.pack(">I", size) + changed[at + 4 :]
    assert code_of(changed) in ("", "invalid_video")  # the reference is skipped, or refused
    with pytest.raises(OSError, match="No such device"):
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


def test_a_size_that_no_memory_has():
    """The structure is shifted, so FFmpeg reads the size of a frame at a wrong place."""
    data = bytearray(FILES["avi-h264"]) + bytes(7)
    data[-13:-13] = b"\0\0\0\0\0 "
    data[44:48] = b" " + bytes(11)
    assert "needs more memory than there is" in refused(bytes(data))


@settings(max_examples=400)
@given(data=st.data())
def test_damaged_files_raise_nothing_else(data: st.DataObject):
    """Bytes of a file are changed, removed and repeated."""
    damaged = bytearray(FILES[data.draw(st.sampled_from(sorted(FILES)))])
    for _ in range(data.draw(st.integers(1, 6))):
        # Most changes are in the header, where they have more effect.
        last = data.draw(st.sampled_from([64, 600, len(damaged)]))
        at = data.draw(st.integers(0, min(last, len(damaged))))
        if data.draw(st.booleans()):  # the index of an mp4 file is at its end
            at = max(0, len(damaged) - at)
        end = at + data.draw(st.integers(0, 16))
        damaged[at:end] = data.draw(st.binary(max_size=16))
    assert code_of(bytes(damaged)) in ("", "invalid_video")


@settings(max_examples=100)
@given(data=st.data())
def test_files_that_end_early_raise_nothing_else(data: st.DataObject):
    whole = FILES[data.draw(st.sampled_from(sorted(FILES)))]
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    assert code_of(cut) in ("", "invalid_video")


@given(data=st.binary(max_size=300), head=st.sampled_from([b"", *(d[:60] for d in FILES.values())]))
def test_random_bytes_raise_nothing_else(data: bytes, head: bytes):
    assert code_of(head + data) in ("", "invalid_video")
