"""The URLs of media: reads data URLs, and checks those that are fetched.

The address of a URL that is fetched is checked here, because the process that reads the request
finds the URLs, and another process fetches them (runtime/media/fetch_media.py).
"""

from __future__ import annotations

import binascii
import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.media_kinds import MediaKind

__all__ = (
    "FetchTarget",
    "UrlWords",
    "data_url_bytes",
    "data_url_frames",
    "fetch_target",
    "input_audio_bytes",
    "is_data_url",
    "is_frames_url",
    "url_words",
)

_DATA_SCHEME = "data:"
_FRAMES_HEAD = "data:video/jpeg;base64,"
_PORTS = {"http": 80, "https": 443}
_MAX_URL = 8192  # characters of a URL that is fetched
# Characters that parsers of URLs treat differently: they remove, convert or refuse them.
_AMBIGUOUS = re.compile(r"[\x00-\x20\x7f\\]")
# Printable ASCII. Other characters of a path or query are percent-encoded.
_KEPT = "".join(map(chr, range(0x21, 0x7F)))


class UrlWords(NamedTuple):
    """The words of errors about the URL of a medium, and of the request that fetches it."""

    noun: str
    accepts: str  # the header Accept
    setting: str  # the most bytes
    example: str  # of a data URL
    code: str
    size_code: str  # of a file with more bytes


_WORDS = {
    MediaKind.image: UrlWords(
        "image",
        "image/*",
        "images.max_mib",
        "data:image/png;base64,DATA",
        "invalid_image_url",
        "invalid_image_url",
    ),
    MediaKind.video: UrlWords(
        "video",
        "video/*",
        "video.max_mib",
        "data:video/mp4;base64,DATA",
        "invalid_video_url",
        "invalid_video_url",
    ),
    MediaKind.sound: UrlWords(
        "sound",
        "audio/*",
        "audio.max_mib",
        "data:audio/wav;base64,DATA",
        "invalid_audio_url",
        "audio_too_large",
    ),
}


def url_words(kind: MediaKind) -> UrlWords:
    """The words for a kind of media."""
    return _WORDS[kind]


class FetchTarget(NamedTuple):
    """The parts of a URL whose content is fetched."""

    scheme: str  # http or https
    host: str  # a name in lower case, or an address without brackets
    port: int
    target: str  # path and query, percent-encoded
    is_literal: bool  # the host is an address

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def is_data_url(url: str) -> bool:
    """Whether the URL has the bytes of the file itself."""
    return url[: len(_DATA_SCHEME)].lower() == _DATA_SCHEME


def is_frames_url(url: str) -> bool:
    """Whether the URL has the frames of a video as JPEG files."""
    return url[: len(_FRAMES_HEAD)].lower() == _FRAMES_HEAD


def data_url_bytes(url: str, max_bytes: int, name: str, kind: MediaKind) -> bytes:
    """The bytes of a data URL in base64. Its media type has no effect.

    Args:
        url: `data:MEDIA_TYPE;base64,DATA`. Line breaks in the data are skipped.
        max_bytes: a larger file is refused before it is decoded.
        name: the name of the medium in errors.
        kind: what it is.

    Raises:
        InvalidRequestError: the URL is not in base64, or too large.
    """
    words = url_words(kind)
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        problem = f"is a data URL without ';base64,'; write {words.example}"
        raise _invalid(name, problem, words)
    text = _without_breaks(text)
    _check_size(text, max_bytes, name, words)
    return _from_base64(text, name, words)


def input_audio_bytes(data: str, max_bytes: int, name: str) -> bytes:
    """The bytes of `input_audio`, which has base64 without a URL.

    Args:
        data: base64. Line breaks are skipped.
        max_bytes: a larger file is refused before it is decoded.
        name: the name of the sound in errors.

    Raises:
        InvalidRequestError: it is not base64 (`invalid_audio`), or too large (`audio_too_large`).
    """
    words = url_words(MediaKind.sound)._replace(code="invalid_audio")
    if is_data_url(data):
        raise _invalid(
            name,
            "is not valid base64: it begins with 'data:'; leave out 'data:...;base64,', or send it"
            " as audio_url",
            words,
        )
    text = _without_breaks(data)
    _check_size(text, max_bytes, name, words)
    return _from_base64(text, name, words)


def data_url_frames(url: str, max_bytes: int, max_frames: int, name: str) -> list[bytes]:
    """The JPEG files of a URL for which `is_frames_url` is true.

    Args:
        url: `data:video/jpeg;base64,FRAME,FRAME`. Line breaks in the data are skipped.
        max_bytes: of all frames. A larger URL is refused before it is decoded.
        max_frames: a URL with more frames is refused.
        name: the name of the video in errors.

    Raises:
        InvalidRequestError: a frame is not in base64, or there are too many, or they are too large.
    """
    words = url_words(MediaKind.video)
    text = _without_breaks(url[len(_FRAMES_HEAD) :])
    _check_size(text, max_bytes, name, words)
    num_frames = text.count(",") + 1
    if num_frames > max_frames:
        raise _invalid(
            name,
            f"has {num_frames} frames, and video.max_frames allows {max_frames}; send fewer",
            words,
        )
    return [_from_base64(frame, name, words) for frame in text.split(",")]


def _without_breaks(text: str) -> str:
    """Base64 without line breaks."""
    return text.replace("\r", "").replace("\n", "") if "\n" in text else text


def _check_size(text: str, max_bytes: int, name: str, words: UrlWords) -> None:
    """Refuse base64 that is too large, before it is decoded."""
    size = len(text) // 4 * 3 - text[-2:].count("=")
    if size > max_bytes:
        raise _invalid(
            name,
            f"has {size} bytes, and {words.setting} allows {max_bytes}; send a smaller"
            f" {words.noun}",
            words._replace(code=words.size_code),
        )


def _from_base64(text: str, name: str, words: UrlWords) -> bytes:
    try:
        if len(text) % 4:
            raise ValueError("the length is no multiple of 4")  # noqa: TRY301
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        remedy = "encode the file's bytes with padding"
        if "-" in text or "_" in text:
            remedy += " and the standard alphabet, which has '+' and '/' and not '-' and '_'"
        raise _invalid(name, f"is not valid base64 ({error}); {remedy}", words) from error


def fetch_target(url: str, domains: Sequence[str], name: str, kind: MediaKind) -> FetchTarget:
    """Check that the content of a URL may be fetched.

    Args:
        url: the URL. A fragment has no effect.
        domains: `images.domains`: the hosts from which media are fetched.
        name: the name of the medium in errors.
        kind: what it is.

    Raises:
        InvalidRequestError: it is not a URL of HTTP, or its host is not in `domains`.
    """
    words = url_words(kind)
    shown = repr(url[:100])
    if len(url) > _MAX_URL:
        problem = f"has a URL of {len(url)} characters; at most {_MAX_URL} are allowed"
        raise _invalid(name, problem, words)
    if _AMBIGUOUS.search(url):
        problem = f"has the URL {shown} with a space, backslash or control character; encode it"
        raise _invalid(name, problem, words)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        problem = f"has the URL {shown}, which is not valid: {error}"
        raise _invalid(name, problem, words) from error
    if parts.scheme not in _PORTS or not host:
        problem = f"has the URL {shown}; it must begin with data:, https:// or http:// and a host"
        raise _invalid(name, problem, words)
    if "@" in parts.netloc:
        problem = "has a URL with a user name; leave out the part before the '@'"
        raise _invalid(name, problem, words)
    if host not in {domain.lower() for domain in domains}:
        raise _invalid(
            name,
            f"is at the host {host[:200]!r}, from which this server fetches no {words.noun}s"
            f" (images.domains); send the {words.noun} as {words.example}",
            words,
        )
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    return FetchTarget(
        scheme=parts.scheme,
        host=host,
        port=_PORTS[parts.scheme] if port is None else port,
        target=quote(target, safe=_KEPT),
        is_literal=_is_address(host),
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _invalid(name: str, problem: str, words: UrlWords) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {problem}", param=name.partition(":")[0], code=words.code)
