"""Files that are too large, damaged or of other formats are refused, before they take memory."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.prepare_image import ImageLimits, prepare_image
from tests.arch.tree import ROOT

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20)
SPEC = ImageSpec(
    sizing=ImageSizing.fixed, placeholder_id=9, placeholder="x", marked_placeholder="x",
    mean=(0, 0, 0), std=(1, 1, 1), patch_size=14, size=(28, 28), num_tokens=4,
)  # fmt: skip
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def encoded(file_format: str) -> bytes:
    out = io.BytesIO()
    Image.effect_noise((50, 40), 60).convert("RGB").save(out, file_format)
    return out.getvalue()


ENCODED = {file_format: encoded(file_format) for file_format in FORMATS}


def refused(data: bytes, limits: ImageLimits = LIMITS) -> str:
    """The message with which an image is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        prepare_image(data, SPEC, limits, "messages.0.content.1")
    error = caught.value
    assert (error.param, error.code, error.status) == ("messages.0.content.1", "invalid_image", 400)
    assert str(error).startswith("messages.0.content.1: the ")
    return str(error)


def png(width: int, height: int, *, whole: bool, has_alpha: bool = False) -> bytes:
    """A PNG of one colour, without its data if it is not whole.

    A pixel has one bit, or 32 bits if the image has transparency.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b""
    if whole:
        compressor = zlib.compressobj(9)
        line = bytes(1 + (width * 4 if has_alpha else (width + 7) // 8))
        rows = b"".join(compressor.compress(line) for _ in range(height)) + compressor.flush()
    depth, colour_type = (8, 6) if has_alpha else (1, 0)
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    """The header of a lossless WebP file, without data."""
    size = struct.pack("<I", (width - 1) | (height - 1) << 14)
    data = b"VP8L" + struct.pack("<I", 60) + b"\x2f" + size + bytes(55)
    return b"RIFF" + struct.pack("<I", len(data) + 4) + b"WEBP" + data


def gif(width: int, height: int, num_frames: int) -> bytes:
    """A GIF with equal frames of one pixel."""
    header = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\xff\0\0\0\0\0"
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return header + frame * num_frames + b";"


def bmp(width: int, height: int) -> bytes:
    """The header of a BMP file, without data."""
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info


def jpeg(width: int, height: int) -> bytes:
    """A JPEG file whose header states another size."""
    data = ENCODED["JPEG"]
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


OTHER = {
    "empty": b"",
    "text": b"This is a picture.",
    "html": b"<!doctype html><img src=x>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
    "fits": b"SIMPLE  =                    T / FITS".ljust(80) + b"BITPIX  = 8".ljust(2800),
    "pdf": b"%PDF-1.7\n",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_formats_are_refused(name: str):
    assert "supported: PNG, JPEG, WebP, GIF, BMP" in refused(OTHER[name])


@pytest.mark.parametrize("file_format", ["TIFF", "ICO", "PPM", "TGA", "PCX", "DIB", "ICNS"])
def test_other_formats_of_pillow_are_refused(file_format: str):
    assert "not an image of a supported format" in refused(encoded(file_format))


@pytest.mark.parametrize("file_format", FORMATS)
def test_truncated_files_are_refused(file_format: str):
    data = ENCODED[file_format]
    prepare_image(data, SPEC, LIMITS, "image")
    for length in (20, 60, len(data) // 4, len(data) // 2, len(data) * 3 // 4):
        assert refused(data[:length])


@pytest.mark.parametrize("file_format", FORMATS)
def test_changed_bytes_give_an_image_or_a_refusal(file_format: str):
    data = ENCODED[file_format]

    @settings(deadline=None, max_examples=80)
    @given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), min_size=1, max_size=4))
    def check(changes: list[tuple[int, int]]):
        changed = bytearray(data)
        for at, value in changes:
            changed[at] = value
        with contextlib.suppress(InvalidRequestError):
            prepared = prepare_image(bytes(changed), SPEC, LIMITS, "image")
            assert len(prepared.parts[0].pixels) == 28 * 28 * 3

    check()


def test_the_bytes_of_a_file_are_limited():
    data = ENCODED["PNG"]
    for max_bytes in (len(data), len(data) - 1):
        limits = ImageLimits(max_bytes=max_bytes, max_pixels=2000)
        if max_bytes == len(data):
            prepare_image(data, SPEC, limits, "image")
        else:
            assert f"{len(data)} bytes, but at most {max_bytes}" in refused(data, limits)


@pytest.mark.parametrize("file_format", FORMATS)
def test_the_pixels_of_a_file_are_limited(file_format: str):
    limits = ImageLimits(max_bytes=1 << 20, max_pixels=1999)
    message = refused(ENCODED[file_format], limits)
    assert "50x40 pixels, but at most 1999" in message
    assert "images.max_pixels" in message


def test_the_first_of_many_frames_is_used():
    one, many = (prepare_image(gif(9, 9, count), SPEC, LIMITS, "image") for count in (1, 10_000))
    assert one == many


BOMBS: dict[str, Callable[[], bytes]] = {
    "png": lambda: png(20_000, 20_000, whole=True),
    "png-below-the-limit-of-pillow": lambda: png(12_000, 12_000, whole=True),
    "png-header": lambda: png(2**31 - 1, 2**31 - 1, whole=False),
    "png-narrow": lambda: png(100_000_000, 1, whole=False),
    "webp": lambda: webp(16_383, 16_383),
    "webp-below-the-limit-of-pillow": lambda: webp(12_000, 12_000),
    "gif": lambda: gif(65_535, 65_535, 1),
    "gif-below-the-limit-of-pillow": lambda: gif(12_000, 12_000, 10_000),
    "bmp": lambda: bmp(12_000, 12_000),
    "jpeg": lambda: jpeg(12_000, 12_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_large_images_in_small_files_are_refused(name: str):
    data = BOMBS[name]()
    assert len(data) < 200_000
    assert "images.max_pixels" in refused(
        data, ImageLimits(max_bytes=1 << 20, max_pixels=64_000_000)
    )


_MEASURE = """
import resource, sys
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.prepare_image import prepare_image
from tests.runtime.images import test_damaged_images as files

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def prepare(data):
    limits = files.ImageLimits(max_bytes=1 << 20, max_pixels=16_000_000)
    try:
        return prepare_image(data, files.SPEC, limits, "image")
    except InvalidRequestError:
        return None

bombs = [make() for make in files.BOMBS.values()]
allowed = files.png(4000, 4000, whole=True, has_alpha=True)
assert prepare(files.ENCODED["PNG"]) is not None
before = peak()
for bomb in bombs:
    assert prepare(bomb) is None
refused = peak()
assert prepare(allowed) is not None
print(refused - before, peak() - refused)
"""


def test_refused_images_take_no_memory_and_allowed_ones_8_bytes_a_pixel():
    out = subprocess.run(
        [sys.executable, "-c", _MEASURE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    refused_kib, allowed_kib = map(int, out.split())
    assert refused_kib < 8 << 10
    assert allowed_kib < 8 * 16_000_000 / 1024 + (8 << 10)
