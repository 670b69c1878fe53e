"""Where the images of a prompt come from: data URLs, HTTP URLs, or images of Pillow.

The address of a URL that is fetched is checked here too, because the process that reads the request
finds the URLs, and another process fetches them (`fetch_images.py`).
"""

from __future__ import annotations

import binascii
import ipaddress
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlsplit

from ostinato.runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    import PIL.Image

__all__ = ("FetchTarget", "ImageSource", "data_url_bytes", "fetch_target", "is_data_url")

_DATA_SCHEME = "data:"
_PORTS = {"http": 80, "https": 443}
_MAX_URL = 8192  # characters of a URL that is fetched
# Characters that parsers of URLs treat differently: they remove, convert or refuse them.
_AMBIGUOUS = re.compile(r"[\x00-\x20\x7f\\]")
# Printable ASCII. Other characters of a path or query are percent-encoded.
_KEPT = "".join(map(chr, range(0x21, 0x7F)))


class ImageSource(NamedTuple):
    """One image of a prompt. It has either a URL or an image of Pillow."""

    url: str = ""  # data:, http: or https:
    pil: PIL.Image.Image | None = None
    is_small: bool = False  # resized to at most `SMALL_PIXELS`


class FetchTarget(NamedTuple):
    """The parts of a URL whose image is fetched."""

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
    """Whether the URL has the bytes of the image itself."""
    return url[: len(_DATA_SCHEME)].lower() == _DATA_SCHEME


def data_url_bytes(url: str, max_bytes: int, name: str) -> bytes:
    """The bytes of a data URL in base64. Its media type has no effect.

    Args:
        url: `data:MEDIA_TYPE;base64,DATA`. Line breaks in the data are skipped.
        max_bytes: a larger image is refused before it is decoded.
        name: the name of the image in errors.

    Raises:
        InvalidRequestError: the URL is not in base64, or too large.
    """
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise _invalid(name, "is a data URL without ';base64,'; write data:image/png;base64,DATA")
    if "\n" in text:
        text = text.replace("\r", "").replace("\n", "")
    size = len(text) // 4 * 3 - (text[-2:].count("="))
    if size > max_bytes:
        raise _invalid(
            name,
            f"has {size} bytes, and images.max_mib allows {max_bytes}; send a smaller image",
        )
    try:
        if len(text) % 4:
            raise ValueError("the length is no multiple of 4")  # noqa: TRY301
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise _invalid(
            name, f"is not valid base64 ({error}); encode the file's bytes with padding"
        ) from error


def fetch_target(url: str, domains: Sequence[str], name: str) -> FetchTarget:
    """Check that the image of a URL may be fetched.

    Args:
        url: the URL. A fragment has no effect.
        domains: `images.domains`: the hosts from which images are fetched.
        name: the name of the image in errors.

    Raises:
        InvalidRequestError: it is not a URL of HTTP, or its host is not in `domains`.
    """
    shown = repr(url[:100])
    if len(url) > _MAX_URL:
        raise _invalid(name, f"has a URL of {len(url)} characters; at most {_MAX_URL} are allowed")
    if _AMBIGUOUS.search(url):
        raise _invalid(
            name, f"has the URL {shown} with a space, backslash or control character; encode it"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise _invalid(name, f"has the URL {shown}, which is not valid: {error}") from error
    if parts.scheme not in _PORTS or not host:
        raise _invalid(
            name, f"has the URL {shown}; it must begin with data:, https:// or http:// and a host"
        )
    if "@" in parts.netloc:
        raise _invalid(name, "has a URL with a user name; leave out the part before the '@'")
    if host not in {domain.lower() for domain in domains}:
        raise InvalidRequestError(
            f"{name} is at the host {host[:200]!r}, from which this server fetches no images"
            " (images.domains); send the image as data:image/png;base64,DATA",
            param=name.partition(":")[0],
            code="invalid_image_url",
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


def _invalid(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} {problem}", param=name.partition(":")[0], code="invalid_image_url"
    )
