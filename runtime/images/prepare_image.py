"""Decodes an image and gives it the size that a model takes.

The bytes come from clients. So the size in the file's header is compared with the limits before
anything is decoded, and only five formats are read. The results are those of the image processors
of transformers on Pillow, to the last bit, with two exceptions: the 16 bits of a grey image are
scaled to 8 bits (transformers cuts values above 255 off), and images are turned as their EXIF
orientation says. Colour profiles have no effect.
"""

from __future__ import annotations

import io
import math

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

from ostinato.models.vision.image_spec import MAX_ASPECT_RATIO, ImageSizing, ImageSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.images import PromptImage, image_digest

__all__ = ("ImageLimits", "prepare_image", "prepare_pil")

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


def prepare_image(data: bytes, spec: ImageSpec, limits: ImageLimits, name: str) -> PromptImage:
    """Decode an encoded image and resize it.

    Of an animation, the first frame is used. At its peak, the memory is about 8 bytes for each
    pixel of the image, 12 if it has transparency and is turned, and 4 more for each pixel of the
    square to which it is padded, and of the resized image.

    Args:
        data: a PNG, JPEG, WebP, GIF or BMP file.
        spec: how the model takes images.
        limits: a larger image is refused before it is decoded.
        name: the part of the request that has the image, for errors.

    Returns:
        The image with `begin` 0.

    Raises:
        InvalidRequestError: the image is too large, not in one of the formats, damaged, or too
            long and narrow. Its code is `invalid_image`.
    """
    if len(data) > limits.max_bytes:
        raise _refusal(
            name,
            f"the image has {len(data)} bytes, but at most {limits.max_bytes} are allowed "
            "(images.max_mib); send a smaller file",
        )
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise _refusal(
            name, f"the data is not an image of a supported format; supported: {_FORMAT_NAMES}"
        ) from error
    except Image.DecompressionBombError as error:
        raise _refusal(
            name,
            f"the image has more pixels than can be decoded; at most {limits.max_pixels} are "
            "allowed (images.max_pixels); send a smaller image",
        ) from error
    except MemoryError:
        raise
    # Pillow's decoders raise errors of many classes for damaged files.
    except Exception as error:
        raise _damaged(name, error) from error
    return _prepare(image, spec, limits, name)


def prepare_pil(image: Image.Image, spec: ImageSpec, limits: ImageLimits, name: str) -> PromptImage:
    """Resize an image of Pillow.

    Args:
        image: of any mode besides I, F and La. It is not changed, but it is loaded.
        spec: how the model takes images.
        limits: `max_bytes` has no effect.
        name: the part of the request that has the image, for errors.

    Returns:
        The image with `begin` 0.

    Raises:
        InvalidRequestError: the image is too large, damaged, too long and narrow, or of a mode
            that is not supported. Its code is `invalid_image`.
    """
    if image.mode in ("I", "F", "La"):
        raise _refusal(
            name,
            f"images of mode {image.mode} are not supported; convert it to mode RGB, RGBA or L",
        )
    return _prepare(image, spec, limits, name)


def _prepare(image: Image.Image, spec: ImageSpec, limits: ImageLimits, name: str) -> PromptImage:
    """Decode an opened image and resize it."""
    _check_size(image.width, image.height, limits, name)
    try:
        image.load()
        image = _turned(_to_rgb(image))
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(name, error) from error
    _check_size(image.width, image.height, limits, name)
    is_fixed = spec.sizing is ImageSizing.fixed
    image = _fixed(image, spec, limits, name) if is_fixed else _dynamic(image, spec, name)
    width, height = image.size
    pixels = image.tobytes()
    return PromptImage(
        digest=image_digest(height, width, pixels),
        begin=0,
        num_tokens=spec.count_tokens(height, width),
        height=height,
        width=width,
        pixels=pixels,
    )


def _check_size(width: int, height: int, limits: ImageLimits, name: str) -> None:
    if width < 1 or height < 1:
        raise _refusal(name, f"the image is {width}x{height} pixels; it must have at least one")
    if width * height > limits.max_pixels:
        raise _refusal(
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


def _fixed(image: Image.Image, spec: ImageSpec, limits: ImageLimits, name: str) -> Image.Image:
    """The image in the one size that the model takes."""
    width, height = image.size
    if spec.pads_to_square and width != height:
        edge = max(width, height)
        if edge * edge > limits.max_pixels:
            raise _refusal(
                name,
                f"the image is {width}x{height} pixels and is padded to {edge}x{edge}, but at "
                f"most {limits.max_pixels} pixels are allowed (images.max_pixels); send a smaller "
                "image",
            )
        red, green, blue = (int(colour * 255) for colour in spec.mean)
        square = Image.new("RGB", (edge, edge), (red, green, blue))
        square.paste(image, ((edge - width) // 2, (edge - height) // 2))
        image = square
    if spec.shortest_edge:
        _check_shape(*image.size, name)
        width, height = image.size
        shorter, longer = sorted(image.size)
        long_edge = int(spec.shortest_edge * longer / shorter)
        short_edge = spec.shortest_edge
        size = (short_edge, long_edge) if width <= height else (long_edge, short_edge)
        image = image.resize(size, spec.resample)
    elif spec.size != (0, 0):
        image = image.resize((spec.size[1], spec.size[0]), spec.resample)
    if spec.crop == (0, 0):
        return image
    crop_height, crop_width = spec.crop
    left, top = (image.width - crop_width) // 2, (image.height - crop_height) // 2
    # What is outside of the image becomes black.
    return image.crop((left, top, left + crop_width, top + crop_height))


def _dynamic(image: Image.Image, spec: ImageSpec, name: str) -> Image.Image:
    """The image with edges of whole units of merged patches, and an area within the limits."""
    _check_shape(*image.size, name)
    width, height = image.size
    unit = spec.unit
    new_height, new_width = (round(edge / unit) * unit for edge in (height, width))
    if new_height * new_width > spec.max_pixels:
        scale = math.sqrt(height * width / spec.max_pixels)
        new_height, new_width = (
            max(unit, math.floor(edge / scale / unit) * unit) for edge in (height, width)
        )
    elif new_height * new_width < spec.min_pixels:
        scale = math.sqrt(spec.min_pixels / (height * width))
        new_height, new_width = (math.ceil(edge * scale / unit) * unit for edge in (height, width))
    return image.resize((new_width, new_height), spec.resample)


def _check_shape(width: int, height: int, name: str) -> None:
    """Refuse long and narrow images, whose resized edge could have any length."""
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise _refusal(
            name,
            f"the image is {width}x{height} pixels, but the longer edge must be at most "
            f"{MAX_ASPECT_RATIO} times the shorter one; cut the image into parts",
        )


def _damaged(name: str, error: Exception) -> InvalidRequestError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return _refusal(name, f"the image cannot be decoded ({reason}); the file may be damaged")


def _refusal(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {message}", param=name, code=_CODE)
