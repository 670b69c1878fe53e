"""Gives an image the size that a model takes.

The results are those of the image processors of transformers on Pillow, to the last bit, besides
the two exceptions that `decode_picture.py` names.
"""

from __future__ import annotations

from PIL import Image

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.images.image_tiles import cut_image, text_of_tiles
from ostinato.runtime.media_files.decode_picture import (
    ImageLimits,
    decode_picture,
    load_picture,
    picture_refusal,
)
from ostinato.runtime.media_files.resized_size import check_shape, resized_size, shrunk_size
from ostinato.runtime.types.images import PreparedImages, PromptImage, image_digest

__all__ = ("ImageLimits", "prepare_image", "prepare_pil")


def prepare_image(data: bytes, spec: ImageSpec, limits: ImageLimits, name: str) -> PreparedImages:
    """Decode an encoded image and resize it.

    Of an animation, the first frame is used. At its peak, the memory is that of `decode_picture`,
    and 4 bytes for each pixel of the square to which the image is padded, and of the resized image.

    Args:
        data: a PNG, JPEG, WebP, GIF or BMP file.
        spec: how the model takes images.
        limits: a larger image is refused before it is decoded.
        name: the part of the request that has the image, for errors.

    Returns:
        The image, or its tiles.

    Raises:
        InvalidRequestError: the image is too large, not in one of the formats, damaged, or too
            long and narrow. Its code is `invalid_image`.
    """
    return _sized(decode_picture(data, limits, name), spec, limits, name)


def prepare_pil(
    image: Image.Image, spec: ImageSpec, limits: ImageLimits, name: str
) -> PreparedImages:
    """Resize an image of Pillow.

    Args:
        image: of any mode besides I, F and La. It is not changed, but it is loaded.
        spec: how the model takes images.
        limits: `max_bytes` has no effect.
        name: the part of the request that has the image, for errors.

    Returns:
        The image, or its tiles.

    Raises:
        InvalidRequestError: the image is too large, damaged, too long and narrow, or of a mode
            that is not supported. Its code is `invalid_image`.
    """
    return _sized(load_picture(image, limits, name), spec, limits, name)


def _sized(image: Image.Image, spec: ImageSpec, limits: ImageLimits, name: str) -> PreparedImages:
    """What is made of an image in mode RGB."""
    if spec.tiles is not None:
        rows, columns, tiles = cut_image(image, spec.tiles, spec.resample)
        text = text_of_tiles(rows, columns, spec.tiles, spec.placeholder)
        return PreparedImages(tuple(_part(tile, spec) for tile in tiles), text)
    is_fixed = spec.sizing is ImageSizing.fixed
    image = _fixed(image, spec, limits, name) if is_fixed else _with_shape(image, spec, name)
    return PreparedImages((_part(image, spec),))


def _part(image: Image.Image, spec: ImageSpec) -> PromptImage:
    """An image or tile of the size that the tower takes."""
    width, height = image.size
    pixels = image.tobytes()
    return PromptImage(
        digest=image_digest(height, width, pixels),
        begin=0,
        num_tokens=spec.count_prompt_tokens(height, width),
        height=height,
        width=width,
        pixels=pixels,
        row_tokens=spec.count_row_tokens(width),
    )


def _fixed(image: Image.Image, spec: ImageSpec, limits: ImageLimits, name: str) -> Image.Image:
    """The image in the one size that the model takes."""
    width, height = image.size
    if spec.pads_to_square and width != height:
        edge = max(width, height)
        if edge * edge > limits.max_pixels:
            raise picture_refusal(
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
        check_shape(image.height, image.width, name)
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


def _with_shape(image: Image.Image, spec: ImageSpec, name: str) -> Image.Image:
    """The image within the limits, nearly in its shape, with edges of whole merged patches."""
    width, height = image.size
    check_shape(height, width, name)
    if spec.sizing is ImageSizing.shrunk:
        height, width = shrunk_size(height, width, spec.unit, spec.max_edges)
    else:
        height, width = resized_size(height, width, spec.unit, spec.min_pixels, spec.max_pixels)
    return image.resize((width, height), spec.resample)
