"""Decodes pictures that clients send, and turns and converts them to RGB.

The size in the file's header is compared with the limits before anything is decoded, and only five
formats are read. The 16 bits of a grey picture are scaled to 8 bits (transformers cuts values above
255 off). Pictures are turned as their EXIF orientation says. Colour profiles have no effect.
"""

from __future__ import annotations

import io

import msgspec
import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from ostinato.runtime.errors import InvalidRequestError

__all__ = ("ImageLimits", "decode_picture", "load_picture", "picture_refusal")

# Pillow imports the modules of all its formats if that of an allowed format is not imported yet.
_PLUGINS: tuple[type[ImageFile.ImageFile], ...] = (
    PngImagePlugin.PngImageFile,
    JpegImagePlugin.JpegImageFile,
    WebPImagePlugin.WebPImageFile,
    GifImagePlugin.GifImageFile,
    BmpImagePlugin.BmpImageFile,
)
_FORMATS = tuple(plugin.format or "" for plugin in _PLUGINS)
_FORMAT_NAMES = "PNG, JPEG, WebP, GIF, BMP"
_CODE = "invalid_image"
_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BAND_PIXELS = 1 << 20  # pixels that are put onto white at a time
_WHITE = (255, 255, 255, 255)


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one image as it is sent."""

    max_bytes: int  # of the encoded file
    max_pixels: int  # height * width


def decode_picture(data: bytes, limits: ImageLimits, name: str) -> Image.Image:
    """Decode an encoded picture.

    Of an animation, the first frame is used. At its peak, the memory is about 8 bytes for each
    pixel, 12 if the picture has transparency and is turned.

    Args:
        data: a PNG, JPEG, WebP, GIF or BMP file.
        limits: a larger picture is refused before it is decoded.
        name: the part of the request that has the picture, for errors.

    Returns:
        The picture in mode RGB.

    Raises:
        InvalidRequestError: the picture is too large, not in one of the formats, or damaged. Its
            code is `invalid_image`.
    """
    if len(data) > limits.max_bytes:
        raise picture_refusal(
            name,
            f"the image has {len(data)} bytes, but at most {limits.max_bytes} are allowed "
            "(images.max_mib); send a smaller file",
        )
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise picture_refusal(
            name, f"the data is not an image of a supported format; supported: {_FORMAT_NAMES}"
        ) from error
    except Image.DecompressionBombError as error:
        raise picture_refusal(
            name,
            f"the image has more pixels than can be decoded; at most {limits.max_pixels} are "
            "allowed (images.max_pixels); send a smaller image",
        ) from error
    except MemoryError:
        raise
    # Pillow's decoders raise errors of many classes for damaged files.
    except Exception as error:
        raise _damaged(name, error) from error
    return _loaded(image, limits, name)


def load_picture(image: Image.Image, limits: ImageLimits, name: str) -> Image.Image:
    """A picture of Pillow in mode RGB.

    Args:
        image: of any mode besides I, F and La. It is not changed, but it is loaded.
        limits: `max_bytes` has no effect.
        name: the part of the request that has the picture, for errors.

    Raises:
        InvalidRequestError: the picture is too large, damaged, or of a mode that is not supported.
            Its code is `invalid_image`.
    """
    if image.mode in ("I", "F", "La"):
        raise picture_refusal(
            name,
            f"images of mode {image.mode} are not supported; convert it to mode RGB, RGBA or L",
        )
    return _loaded(image, limits, name)


def _loaded(image: Image.Image, limits: ImageLimits, name: str) -> Image.Image:
    """Decode an opened picture."""
    _check_size(image.width, image.height, limits, name)
    try:
        image.load()
        image = _turned(_to_rgb(image))
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(name, error) from error
    _check_size(image.width, image.height, limits, name)
    return image


def _check_size(width: int, height: int, limits: ImageLimits, name: str) -> None:
    if width < 1 or height < 1:
        raise picture_refusal(
            name, f"the image is {width}x{height} pixels; it must have at least one"
        )
    if width * height > limits.max_pixels:
        raise picture_refusal(
            name,
            f"the image is {width}x{height} pixels, but at most {limits.max_pixels} pixels are "
            "allowed (images.max_pixels); send a smaller image",
        )


def _turned(image: Image.Image) -> Image.Image:
    """The image as its EXIF orientation says; unchanged if its EXIF data cannot be read."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except MemoryError:
        raise
    except Exception:
        return image
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    """The image in mode RGB; what is transparent is put onto white."""
    if image.mode.startswith("I"):
        return _from_16_bits(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    result = Image.new("RGB", image.size)
    result.info = image.info
    # In bands, because otherwise up to four copies of the image are in memory.
    height = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, height):
        box = (0, top, image.width, min(top + height, image.height))
        band = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", band.size, _WHITE)
        result.paste(Image.alpha_composite(white, band).convert("RGB"), box)
    return result


def _from_16_bits(image: Image.Image) -> Image.Image:
    """A grey image with 16 bits for a pixel; its upper 8 bits are used, as of colour images."""
    values = np.asarray(image)
    grey = (values >> 8).clip(0, 255).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    result = Image.fromarray(grey).convert("RGB")
    result.info = image.info
    return result


def _damaged(name: str, error: Exception) -> InvalidRequestError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return picture_refusal(name, f"the image cannot be decoded ({reason}); the file may be damaged")


def picture_refusal(name: str, message: str) -> InvalidRequestError:
    """The error for a picture; its text is the name and the message."""
    return InvalidRequestError(f"{name}: {message}", param=name, code=_CODE)
