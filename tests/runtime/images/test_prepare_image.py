"""Prepared images have the pixels that the processors of transformers make, to the last bit."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.prepare_image import ImageLimits, prepare_image, prepare_pil
from tests.runtime.images.image_processors import (
    LIMITS,
    PROCESSORS,
    one_part,
    picture,
    pixels_of,
    read_spec,
    reference_colours,
)

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")


class Loaded(NamedTuple):
    spec: ImageSpec
    reference: Any  # gives the resized colours 0 to 255


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    found: dict[str, Loaded] = {}
    for name, processor in PROCESSORS.items():
        directory = processor.save(tmp_path_factory.mktemp(name))
        reference = processor.kind.from_pretrained(directory, do_rescale=False, do_normalize=False)
        found[name] = Loaded(read_spec(directory, processor.config), reference)
    return found


def expected_pixels(case: Loaded, image: Image.Image) -> np.ndarray:
    return reference_colours(case.reference, image, case.spec)


def in_mode(image: Image.Image, mode: str, seed: int) -> Image.Image:
    """An image in another mode, with varying transparency in modes that have it."""
    generator = np.random.default_rng(seed)
    alpha = Image.fromarray(generator.integers(0, 256, image.size[::-1], np.uint8))
    if mode in ("RGBA", "RGBa"):
        image = image.convert("RGBA")
        image.putalpha(alpha)
        return image.convert(mode)
    if mode == "LA":
        return Image.merge("LA", (image.convert("L"), alpha))
    if mode == "PA":
        image = image.convert("P").convert("PA")
        image.putalpha(alpha)
        return image
    if mode == "LAB":
        return Image.merge("LAB", image.split())
    converted = image.convert(mode)
    if seed % 2 and mode in ("L", "P", "1", "RGB"):
        pixel = converted.getpixel((0, 0))
        converted.info["transparency"] = bytes(range(256)) if mode == "P" else pixel
    return converted


def encoded(image: Image.Image, file_format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, file_format, **options)
    return out.getvalue()


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_transformers(name: str, loaded: dict[str, Loaded]):
    @settings(deadline=None, max_examples=60)
    @given(st.integers(1, 120), st.integers(1, 120), st.sampled_from(MODES), st.integers(0, 99))
    def check(width: int, height: int, mode: str, seed: int):
        case = loaded[name]
        # In transformers, the edge of an image that is shrunk can become 0.
        assume(case.spec.sizing is not ImageSizing.shrunk or min(width, height) > 1)
        image = in_mode(picture(width, height, seed), mode, seed)
        before = (image.mode, dict(image.info), image.tobytes())
        prepared = prepare_pil(image, case.spec, LIMITS, "image")
        expected = expected_pixels(case, image)
        assert np.array_equal(pixels_of(prepared), expected)
        assert (image.mode, image.info, image.tobytes()) == before
        unit = (case.spec.patch_size * case.spec.merge_size) ** 2
        for part in prepared.parts:
            assert part.num_rows == (
                case.spec.num_tokens if case.spec.has_one_size else part.height * part.width // unit
            )
            num_ends = part.height // case.spec.unit if case.spec.row_ends else 0
            assert part.num_tokens == part.num_rows + num_ends
        assert sum(part.num_rows for part in prepared.parts) <= case.spec.max_tokens
        assert len(prepared.parts) == max(1, prepared.text.count(case.spec.placeholder))

    check()


@pytest.mark.parametrize("name", ["clip", "llava", "qwen2_vl"])
@pytest.mark.parametrize(
    ("file_format", "mode", "options"),
    [
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {"transparency": 3}),
        ("PNG", "L", {"transparency": 40}),
        ("PNG", "1", {}),
        ("JPEG", "RGB", {"quality": 80}),
        ("JPEG", "L", {"progressive": True}),
        ("JPEG", "CMYK", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("WEBP", "RGB", {}),
        ("GIF", "P", {"transparency": 3}),
        ("GIF", "RGB", {}),
        ("BMP", "RGB", {}),
        ("BMP", "P", {}),
        ("BMP", "1", {}),
    ],
)
def test_encoded_files_are_decoded(
    name: str, file_format: str, mode: str, options: dict[str, Any], loaded: dict[str, Loaded]
):
    data = encoded(in_mode(picture(61, 47), mode, 0), file_format, **options)
    prepared = prepare_image(data, loaded[name].spec, LIMITS, "image")
    expected = expected_pixels(loaded[name], Image.open(io.BytesIO(data)))
    assert np.array_equal(pixels_of(prepared), expected)


@pytest.mark.parametrize("orientation", range(1, 10))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_the_exif_orientation_is_applied(
    orientation: int, file_format: str, loaded: dict[str, Loaded]
):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(61, 30), file_format, exif=exif)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    case = loaded["qwen2_vl"]
    prepared = prepare_image(data, case.spec, LIMITS, "image")
    assert np.array_equal(pixels_of(prepared), expected_pixels(case, turned))
    part = one_part(prepared)
    assert (part.height > part.width) == (5 <= orientation <= 8)
    assert prepare_pil(Image.open(io.BytesIO(data)), case.spec, LIMITS, "image") == prepared


def test_damaged_exif_data_has_no_effect(loaded: dict[str, Loaded]):
    image, spec = picture(61, 30), loaded["clip"].spec
    plain = prepare_image(encoded(image, "PNG"), spec, LIMITS, "image")
    for exif in (b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0nonsense", b"\0" * 50):
        assert prepare_image(encoded(image, "PNG", exif=exif), spec, LIMITS, "image") == plain


def test_grey_images_of_16_bits_use_the_upper_8(loaded: dict[str, Loaded]):
    values = np.random.default_rng(0).integers(0, 1 << 16, (40, 50)).astype(np.uint16)
    values[:9] = 77
    upper = Image.fromarray((values >> 8).astype(np.uint8))
    data = encoded(Image.fromarray(values), "PNG")
    for case in loaded.values():
        prepared = prepare_image(data, case.spec, LIMITS, "image")
        assert np.array_equal(pixels_of(prepared), expected_pixels(case, upper))
    # The transparent value becomes white.
    case = loaded["llava"]
    tag = struct.pack(">H", 77)
    chunk = struct.pack(">I", 2) + b"tRNS" + tag + struct.pack(">I", zlib.crc32(b"tRNS" + tag))
    begin = data.index(b"IDAT") - 4
    upper.paste(255, (0, 0, 50, 9))
    prepared = prepare_image(data[:begin] + chunk + data[begin:], case.spec, LIMITS, "image")
    assert np.array_equal(pixels_of(prepared), expected_pixels(case, upper))


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_used(file_format: str, loaded: dict[str, Loaded]):
    first, second = picture(40, 30, 1), picture(40, 30, 2)
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(first, file_format, save_all=True, append_images=[second], **options)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames") == 2  # noqa: B009 - not in its type
    spec = loaded["clip"].spec
    alone = prepare_image(encoded(first, file_format, **options), spec, LIMITS, "image")
    assert prepare_image(data, spec, LIMITS, "image") == alone


def test_equal_pixels_have_equal_digests(loaded: dict[str, Loaded]):
    case, image = loaded["qwen2_vl"], picture(56, 84)
    png, bmp = (
        one_part(prepare_image(encoded(image, file_format), case.spec, LIMITS, "image"))
        for file_format in ("PNG", "BMP")
    )
    assert png == bmp == one_part(prepare_pil(image, case.spec, LIMITS, "image"))
    sizes = struct.pack("<II", png.height, png.width)
    assert png.digest == hashlib.blake2b(sizes + png.pixels, digest_size=32).digest()
    assert (png.begin, png.end) == (0, png.num_tokens)
    changed = image.copy()
    changed.putpixel((3, 5), (1, 2, 3))
    # The same bytes in another shape are another image.
    reshaped = Image.frombytes("RGB", (84, 56), image.tobytes())
    others = [
        one_part(prepare_pil(each, case.spec, LIMITS, "image")) for each in (changed, reshaped)
    ]
    assert others[1].pixels == png.pixels
    assert len({each.digest for each in (png, *others)}) == 3


@given(
    st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 40), st.integers(0, 400),
    st.sampled_from([(1, 1), (2, 1), (1, 2)]),
)  # fmt: skip
@example(200, 1, 4, 0, (2, 1))  # it is enlarged, and both edges are rounded up
@settings(deadline=None, max_examples=100)
def test_no_image_has_more_tokens_than_the_largest(
    width: int, height: int, least: int, more: int, patch: tuple[int, int]
):
    patch_size, merge_size = patch
    unit = (patch_size * merge_size) ** 2
    spec = ImageSpec(
        sizing=ImageSizing.dynamic, placeholder_id=9, placeholder="x", marked_placeholder="x",
        mean=(0, 0, 0), std=(1, 1, 1), patch_size=patch_size, merge_size=merge_size,
        min_pixels=least, max_pixels=least + more, resample=0,
    )  # fmt: skip
    limits = ImageLimits(max_bytes=0, max_pixels=1 << 24)
    ratio = max(width, height) / min(width, height)
    image = Image.new("RGB", (width, height))
    if ratio > 200:
        with pytest.raises(InvalidRequestError, match="at most 200 times"):
            prepare_pil(image, spec, limits, "image")
        return
    prepared = one_part(prepare_pil(image, spec, limits, "image"))
    assert 1 <= prepared.num_tokens <= spec.max_tokens
    assert prepared.num_tokens == prepared.height * prepared.width // unit


@given(
    st.integers(1, 900), st.integers(1, 900), st.integers(1, 90), st.integers(1, 90),
    st.integers(1, 9), st.integers(0, 4000),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_a_shrunk_image_keeps_the_limits(
    width: int, height: int, high: int, wide: int, unit: int, more: int
):
    """Besides the sizes that have no pixels in transformers, they are those of its function."""
    spec = ImageSpec(
        sizing=ImageSizing.shrunk, placeholder_id=9, placeholder="x", marked_placeholder="x",
        mean=(0, 0, 0), std=(1, 1, 1), patch_size=unit, max_edges=(high, wide), resample=0,
        row_ends=(7, 8),
    )  # fmt: skip
    limits = ImageLimits(max_bytes=0, max_pixels=1 << 24)
    image = Image.new("RGB", (width, height))
    if max(width, height) > 200 * min(width, height):
        return
    (prepared,) = prepare_pil(image, spec, limits, "image").parts
    expected = get_resize_output_image_size(
        np.zeros((height, width, 3)), (high, wide), unit, input_data_format="channels_last"
    )
    assert (prepared.height, prepared.width) == tuple(max(edge, unit) for edge in expected)
    assert prepared.num_rows == prepared.height * prepared.width // unit**2 <= spec.max_tokens
    most = spec.least_pixels + more
    limited = spec.limited(most)
    (smaller,) = prepare_pil(image, limited, limits, "image").parts
    assert smaller.height * smaller.width <= most
    assert smaller.num_rows <= limited.max_tokens
    assert spec.limited(1 << 20) == spec


@pytest.mark.parametrize("name", ["clip", "qwen2_vl", "pixtral"])
def test_long_and_narrow_images_are_refused(name: str, loaded: dict[str, Loaded]):
    spec = loaded[name].spec
    for size in ((201, 1), (1, 201)):
        assert len(prepare_pil(Image.new("RGB", (200, 1)), spec, LIMITS, "a.b").parts) == 1
        with pytest.raises(InvalidRequestError, match=r"^a\.b: .*at most 200 times") as caught:
            prepare_pil(Image.new("RGB", size), spec, LIMITS, "a.b")
        assert (caught.value.param, caught.value.code) == ("a.b", "invalid_image")


def test_a_square_to_which_an_image_is_padded_is_limited(loaded: dict[str, Loaded]):
    spec, limits = loaded["llava"].spec, ImageLimits(max_bytes=0, max_pixels=10_000)
    prepared = one_part(prepare_pil(Image.new("RGB", (100, 3)), spec, limits, "image"))
    assert prepared.num_tokens == 4
    with pytest.raises(InvalidRequestError, match=r"padded to 101x101"):
        prepare_pil(Image.new("RGB", (101, 3)), spec, limits, "image")


@pytest.mark.parametrize("mode", ["I", "F", "La"])
def test_modes_that_are_not_clear_are_refused(mode: str, loaded: dict[str, Loaded]):
    with pytest.raises(InvalidRequestError, match=f"mode {mode} .*convert it to mode RGB, RGBA"):
        prepare_pil(Image.new(mode, (9, 9)), loaded["clip"].spec, LIMITS, "image")
