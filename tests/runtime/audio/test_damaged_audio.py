"""Files that are too large, too long, damaged or of other formats are refused; none opens others."""

from __future__ import annotations

import io
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.audio.decode_audio import AudioLimits, decode_audio
from ostinato.runtime.errors import InvalidRequestError
from tests.arch.tree import ROOT
from tests.runtime.audio.audio_files import ENCODINGS, RATE, encode, tone, video_with_sound

LIMITS = AudioLimits(max_bytes=1 << 22, max_seconds=60)
ENCODED = {
    name: encode(tone(4.0, 44_100), 44_100, encoding.container, encoding.codec)
    for name, encoding in ENCODINGS.items()
}
OTHER = {
    "text": b"This is a recording.",
    "html": b"<!doctype html><audio src=x>",
    "zeros": bytes(1000),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(99),
    "riff": b"RIFF\x24\0\0\0WAVE",
    "midi": b"MThd\0\0\0\6\0\0\0\1\0\x60MTrk\0\0\0\4\0\xff\x2f\0",
    "lavfi": b"sine=frequency=440",
    "sdp": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
    b"m=audio 5004 RTP/AVP 0\r\n",
}


def refused(data: bytes, code: str = "invalid_audio", limits: AudioLimits = LIMITS) -> str:
    """The message with which a file is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        decode_audio(data, RATE, limits)
    error = caught.value
    assert (error.param, error.code, error.status) == ("file", code, 400)
    assert str(error).startswith("file: the ")
    return str(error)


def code_of(data: bytes) -> str:
    """The code with which a file is refused; "" if it is decoded."""
    try:
        found = decode_audio(data, RATE, LIMITS)
    except InvalidRequestError as error:
        return error.code or "none"
    assert np.isfinite(found.samples).all()
    assert 0 < len(found.samples) <= (LIMITS.max_seconds + 1) * RATE
    return ""


@pytest.mark.parametrize("name", OTHER)
def test_other_data_is_refused(name: str):
    assert "supported formats: wav, flac, mp3, ogg, m4a, mp4, webm, aac" in refused(OTHER[name])


@pytest.mark.parametrize(
    ("container", "codec"),
    [("aiff", "pcm_s16be"), ("au", "pcm_s16be"), ("caf", "pcm_s16le"), ("avi", "libmp3lame"),
     ("mpegts", "aac"), ("nut", "flac"), ("asf", "libmp3lame"), ("flv", "aac")],
)  # fmt: skip
def test_other_formats_of_ffmpeg_are_refused(container: str, codec: str):
    data = encode(tone(2.0, 44_100), 44_100, container, codec)
    assert av.open(io.BytesIO(data)).streams.audio, "FFmpeg reads it"
    assert "supported formats" in refused(data)


def test_other_codecs_are_refused():
    data = encode(tone(2.0, 44_100), 44_100, "matroska", "ac3")
    assert "the audio is encoded as ac3, which is not supported" in refused(data)


def test_files_without_samples_are_refused():
    assert "the file is empty" in refused(b"")
    assert "the audio is 0 s long" in refused(encode(tone(0.0), RATE) or b"")
    assert "no audio stream" in refused(video_with_sound(None))
    floats = encode(np.array([0.1, np.nan, 0.2], np.float32), RATE, "wav", "pcm_f32le")
    assert "no finite numbers" in refused(floats)


@pytest.mark.parametrize("name", ENCODINGS)
def test_files_that_are_cut_short(name: str):
    """Those whose header states the length are refused; of others, what there is is decoded."""
    data = ENCODED[name]
    for part in (0.3, 0.6):
        cut = data[: int(len(data) * part)]
        if ENCODINGS[name].states_length:
            assert "cut short" in refused(cut)
        else:
            seconds = decode_audio(cut, RATE, LIMITS).seconds
            assert abs(seconds - 4.0 * part) < 1.1  # a page of ogg has a second


def test_an_mp4_whose_index_comes_first_and_whose_end_is_missing_is_refused(tmp_path: Path):
    path = tmp_path / "whole.mp4"
    with (
        av.open(io.BytesIO(ENCODED["mp4"])) as source,
        av.open(str(path), "w", container_options={"movflags": "faststart"}) as target,
    ):
        track = target.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = track
                target.mux(packet)
    data = path.read_bytes()
    assert decode_audio(data, RATE, LIMITS).seconds > 4
    assert data.index(b"moov") < data.index(b"mdat")
    assert "cut short" in refused(data[: len(data) // 2])


def test_too_large_files_are_refused_before_they_are_read():
    message = refused(bytes(1 << 23), "audio_too_large")
    assert f"{1 << 23} bytes, but at most {1 << 22} are allowed (audio.max_mib)" in message


@pytest.mark.parametrize("name", ["wav-s16", "flac", "mp3", "opus", "m4a", "webm"])
def test_too_long_files_are_refused(name: str):
    short = AudioLimits(max_bytes=1 << 22, max_seconds=3.5)
    assert "longer than the 3.5 s that are allowed (audio.max_seconds)" in refused(
        ENCODED[name], "audio_too_long", short
    )


def test_exactly_the_longest_file_is_decoded():
    longest = AudioLimits(max_bytes=1 << 22, max_seconds=4.0)
    for name in ("wav-s16", "flac", "mp3"):
        assert decode_audio(ENCODED[name], RATE, longest).seconds == 4.0


def test_a_header_does_not_make_a_file_shorter():
    """A flac file that says to have a second is refused when more was decoded."""
    data = bytearray(ENCODED["flac"])
    at = data.index(b"fLaC") + 8 + 14  # the last 4 of the 36 bits that count the samples
    data[at : at + 4] = struct.pack(">I", 44_100)
    short = AudioLimits(max_bytes=1 << 22, max_seconds=3.0)
    refused(bytes(data), "audio_too_long", short)


def wav_header(rate: int, num_channels: int) -> bytes:
    """A wav file of 16 bits with 4000 bytes of samples."""
    block = 2 * num_channels
    head = struct.pack("<HHIIHH", 1, num_channels, rate, rate * block & 0xFFFFFFFF, block, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head
    body += b"data" + struct.pack("<I", 4000) + bytes(4000)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_rates_and_channels_that_no_recording_has_are_refused():
    assert decode_audio(wav_header(8000, 1), RATE, LIMITS).seconds == 0.25
    for rate in (1, 999, 384_001, 2**31 - 1):
        assert f"the sampling rate is {rate} Hz" in refused(wav_header(rate, 1))
    for num_channels in (33, 500):
        assert f"{num_channels} channels" in refused(wav_header(8000, num_channels))
    for rate, num_channels in ((0, 1), (2**32 - 1, 1), (8000, 0), (8000, 2**14)):
        refused(wav_header(rate, num_channels))


def test_a_bomb_takes_little_memory():
    """Hours of silence are a small file. Decoding ends at the limit."""
    hour = encode(np.zeros(3600 * 8000, np.float32), 8000, "flac", "flac")
    assert len(hour) < 1 << 20
    script = (
        "import resource, sys\n"
        "from ostinato.runtime.audio.decode_audio import *\n"
        "from ostinato.runtime.errors import InvalidRequestError\n"
        "from ostinato.runtime.media_files.pyav import import_av\n"
        "import_av()\n"
        "data = sys.stdin.buffer.read()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    decode_audio(data, 16000, AudioLimits(max_bytes=1 << 22, max_seconds=60))\n"
        "except InvalidRequestError as error:\n"
        "    print(error.code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=hour, capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    code, grown = done.stdout.split()
    assert code == b"audio_too_long"
    assert int(grown) < 40_000  # KiB; the whole hour has 230 MB


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{url}'\n",
    "dash": (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        'mediaPresentationDuration="PT4S"><Period><AdaptationSet mimeType="audio/mp4">'
        '<Representation id="1" bandwidth="9"><BaseURL>{url}</BaseURL>'
        "</Representation></AdaptationSet></Period></MPD>"
    ),
}


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_opens_no_file(kind: str, tmp_path: Path):
    """The file that it names is a pipe, so opening it for reading would let a writer open it."""
    pipe = tmp_path / "secret.wav"
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
            url = f"{scheme}://127.0.0.1:{port}/secret.wav"
            refused(PLAYLISTS[kind].format(url=url).encode())
        with pytest.raises(TimeoutError):
            server.accept()


def test_ffmpeg_itself_would_open_the_file_of_a_playlist(tmp_path: Path):
    """The playlists above are such that they work without the list of formats."""
    (tmp_path / "secret.wav").write_bytes(ENCODED["wav-s16"])
    playlist = tmp_path / "list.txt"
    playlist.write_text(PLAYLISTS["concat"].format(url="secret.wav"))
    with av.open(str(playlist)) as container:
        assert container.streams.audio
    refused(playlist.read_bytes())


def test_an_mp4_that_refers_to_another_file_is_refused(tmp_path: Path):
    """A track's data can be in another file, which its data reference names."""
    pipe = tmp_path / "secret.m4a"
    os.mkfifo(pipe)
    data = ENCODED["m4a"]
    own = b"\0\0\0\x0curl \0\0\0\x01"
    assert own in data
    name = str(pipe).encode() + b"\0"
    other = struct.pack(">I", 12 + len(name)) + b"url \0\0\0\0" + name
    changed = data.replace(own, other)
    for kind in (b"dref", b"dinf", b"minf", b"mdia", b"trak", b"moov"):
        at = changed.index(kind) - 4
        size = int.from_bytes(changed[at : at + 4], "big") + len(other) - len(own)
        changed = changed[:at] + struct.pack(">I", size) + changed[at + 4 :]
    assert code_of(changed) in ("", "invalid_audio")  # the reference is skipped, or refused
    with pytest.raises(OSError, match="No such device"):
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_files_raise_nothing_else(data: st.DataObject):
    """Bytes of a file are changed, removed and repeated."""
    damaged = bytearray(ENCODED[data.draw(st.sampled_from(sorted(ENCODED)))])
    for _ in range(data.draw(st.integers(1, 6))):
        # Most changes are in the header, where they have more effect.
        last = data.draw(st.sampled_from([64, 600, len(damaged)]))
        at = data.draw(st.integers(0, min(last, len(damaged))))
        end = at + data.draw(st.integers(0, 16))
        damaged[at:end] = data.draw(st.binary(max_size=16))
    assert code_of(bytes(damaged)) in ("", "invalid_audio", "audio_too_long")


@given(
    data=st.binary(max_size=300), head=st.sampled_from([b"", *(d[:40] for d in ENCODED.values())])
)
def test_random_bytes_raise_nothing_else(data: bytes, head: bytes):
    assert code_of(head + data) in ("", "invalid_audio")
