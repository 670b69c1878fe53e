"""Data URLs, and URLs that may be fetched."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.media_files.media_urls import (
    data_url_bytes,
    data_url_frames,
    fetch_target,
    input_audio_bytes,
    is_frames_url,
)

NAME = "messages: image 3"


@given(st.binary(max_size=200), st.sampled_from(["", "image/png", "text/html;charset=x"]))
def test_the_bytes_of_a_data_url_whatever_its_media_type(data, media_type):
    text = base64.b64encode(data).decode()
    for url in (f"data:{media_type};base64,{text}", f"DATA:{media_type};BASE64,{text}"):
        assert data_url_bytes(url, 200, NAME, MediaKind.image) == data
    wrapped = base64.encodebytes(data).decode().replace("\n", "\r\n")
    assert data_url_bytes(f"data:;base64,{wrapped}", 200, NAME, MediaKind.image) == data


@given(st.text(max_size=40))
def test_every_other_text_is_an_error_that_names_the_image(text):
    for url in (f"data:{text}", f"data:;base64,{text}"):
        encoded = text.rpartition(",")[2].replace("\r", "").replace("\n", "")
        problem = None
        try:
            data = data_url_bytes(url, 1000, NAME, MediaKind.image)
        except InvalidRequestError as error:
            problem = error
        else:
            assert base64.b64decode(encoded, validate=True) == data
        if problem is not None:
            assert (problem.param, problem.code) == ("messages", "invalid_image_url")
            assert str(problem).startswith(f"{NAME} ")


@pytest.mark.parametrize(
    "text", ["AAA", "AAAA=", "AA-_", "AA==AAAA", "A===", "AA AA", "%41AAA", "é"]
)
def test_wrong_base64(text):
    with pytest.raises(InvalidRequestError, match="is not valid base64"):
        data_url_bytes(f"data:;base64,{text}", 1000, NAME, MediaKind.image)


def test_base64_without_a_url():
    data = bytes(range(251, 256)) * 3
    text = base64.b64encode(data).decode()
    assert input_audio_bytes(f"{text[:8]}\r\n{text[8:]}", 15, NAME) == data
    assert input_audio_bytes("", 15, NAME) == b""
    for wrong, code, message in (
        (f"data:audio/wav;base64,{text}", "invalid_audio", "leave out 'data:...;base64,', or"),
        (base64.urlsafe_b64encode(data).decode(), "invalid_audio", "the standard alphabet"),
        (text[:-1], "invalid_audio", "encode the file's bytes with padding"),
        (text + "AAAA", "audio_too_large", "has 18 bytes, and audio.max_mib allows 15; send a"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            input_audio_bytes(wrong, 15, NAME)
        assert (refused.value.param, refused.value.code) == ("messages", code)
        assert message in str(refused.value)
    with pytest.raises(InvalidRequestError, match="and the standard alphabet, which has"):
        data_url_bytes("data:;base64,AA-_", 15, NAME, MediaKind.image)


def test_a_data_url_that_is_too_large_is_not_decoded():
    for size in (9, 10, 11, 12):
        url = f"data:;base64,{base64.b64encode(bytes(size)).decode()}"
        if size <= 10:
            assert len(data_url_bytes(url, 10, NAME, MediaKind.image)) == size
        else:
            with pytest.raises(InvalidRequestError, match=f"has {size} bytes, and images.max_mib"):
                data_url_bytes(url, 10, NAME, MediaKind.image)
    with pytest.raises(InvalidRequestError, match="has 12 bytes"):
        data_url_bytes("data:;base64," + "!" * 16, 10, NAME, MediaKind.image)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://a.test/x", "must begin with data:, https:// or http://"),
        ("file:///etc/passwd", "must begin with"),
        ("/etc/passwd", "must begin with"),
        ("", "must begin with"),
        ("http:///x", "must begin with"),
        ("http://169.254.169.254/latest", "'169.254.169.254', from which this server fetches no"),
        ("http://localhost/", "images.domains"),
        ("http://b.a.test/", "images.domains"),
        ("http://a.test.evil/", "images.domains"),
        ("http://a.test./", "images.domains"),
        ("http://evil\\@a.test/", "backslash"),
        ("http://a.test/\r\nHost: b", "control character"),
        (" http://a.test/", "space"),
        ("http://a.test:99999/", "not valid"),
        ("http://[::1/", "not valid"),
        ("http://me:secret@a.test/", "user name"),
        ("http://a.test/" + "x" * 9000, "9014 characters"),
    ],
)
def test_urls_that_are_not_fetched(url, text):
    with pytest.raises(InvalidRequestError) as refused:
        fetch_target(url, ["a.test"], NAME, MediaKind.image)
    assert text in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "authority", "target"),
    [
        ("http://A.test", "a.test", "/"),
        ("https://a.test:443/x?y#z", "a.test", "/x?y"),
        ("https://a.test:8443?q=1", "a.test:8443", "/?q=1"),
        ("http://[2001:db8::1]:80/x", "[2001:db8::1]", "/x"),
    ],
)
def test_the_parts_of_a_url(url, authority, target):
    found = fetch_target(url, ["a.test", "2001:db8::1"], NAME, MediaKind.image)
    assert (found.authority, found.target) == (authority, target)
    assert found.is_literal == ("[" in authority)


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6))
def test_the_frames_of_a_data_url(frames):
    texts = [base64.b64encode(frame).decode() for frame in frames]
    for head, comma in (("data:video/jpeg;base64,", ","), ("DATA:Video/JPEG;Base64,", "\r\n,")):
        url = head + comma.join(texts)
        assert is_frames_url(url)
        assert data_url_frames(url, 1000, 6, NAME) == frames
        if len(frames) > 1:
            with pytest.raises(InvalidRequestError, match=r"video\.max_frames allows"):
                data_url_frames(url, 1000, len(frames) - 1, NAME)
    assert not is_frames_url("data:video/mp4;base64,AAAA")
    assert not is_frames_url("data:video/jpeg,AAAA")


def test_words_of_videos():
    with pytest.raises(InvalidRequestError) as refused:
        data_url_bytes("data:;base64," + "A" * 40, 9, NAME, MediaKind.video)
    assert "has 30 bytes, and video.max_mib allows 9; send a smaller video" in str(refused.value)
    assert refused.value.code == "invalid_video_url"
    with pytest.raises(InvalidRequestError) as refused:
        fetch_target("http://b.test/", ["a.test"], NAME, MediaKind.video)
    assert "fetches no videos (images.domains); send the video as data:video/mp4" in str(
        refused.value
    )


def test_words_of_sounds():
    with pytest.raises(InvalidRequestError) as refused:
        data_url_bytes("data:;base64," + "A" * 40, 9, NAME, MediaKind.sound)
    assert "has 30 bytes, and audio.max_mib allows 9; send a smaller sound" in str(refused.value)
    assert refused.value.code == "audio_too_large"
    with pytest.raises(InvalidRequestError) as refused:
        fetch_target("http://b.test/", ["a.test"], NAME, MediaKind.sound)
    assert "fetches no sounds (images.domains); send the sound as data:audio/wav" in str(
        refused.value
    )
