"""Prepares one image of a prompt for the engine."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_sources import ImageSource
from ostinato.runtime.media_files.media_kinds import MediaKind, most_bytes
from ostinato.runtime.media_files.media_urls import data_url_bytes, is_data_url
from ostinato.runtime.types.images import PreparedImages

__all__ = (
    "SMALL_PIXELS",
    "check_detail",
    "preload_images",
    "prepare_image_source",
)

SMALL_PIXELS = 512 * 512  # the most pixels of an image with `detail` low


def preload_images() -> None:
    """Import what `prepare_image_source` needs, so that forks of this process share it."""
    from ostinato.runtime.images import prepare_image  # noqa: F401 - it has NumPy and Pillow


def check_detail(source: ImageSource, spec: ImageSpec, name: str) -> None:
    """Raises InvalidRequestError if an image cannot be made as small as the request asks.

    Args:
        source: the image.
        spec: how the model takes images.
        name: the name of the image in errors.
    """
    if source.is_small:
        _small(spec, name)


def prepare_image_source(
    source: ImageSource,
    spec: ImageSpec,
    config: ImagesConfig,
    name: str,
    fetched: Mapping[str, bytes],
) -> PreparedImages:
    """Decode and resize an image. Pillow is imported with the first image.

    Args:
        source: the image, which `check_detail` has checked.
        spec: how the model takes images.
        config: the limits.
        name: the name of the image in errors.
        fetched: URL -> the bytes that were fetched; has the source's URL, unless it is a data URL.

    Returns:
        The image, or its tiles.

    Raises:
        InvalidRequestError: the image is not valid, or too large.
    """
    from ostinato.runtime.images.prepare_image import ImageLimits, prepare_image, prepare_pil

    limits = ImageLimits(max_bytes=most_bytes(config), max_pixels=config.max_pixels)
    if source.is_small:
        spec = _small(spec, name)
    if source.pil is not None:
        return prepare_pil(source.pil, spec, limits, name)
    data = (
        data_url_bytes(source.url, limits.max_bytes, name, MediaKind.image)
        if is_data_url(source.url)
        else fetched[source.url]
    )
    return prepare_image(data, spec, limits, name)


def _small(spec: ImageSpec, name: str) -> ImageSpec:
    """The spec for an image with `detail` low: at most `SMALL_PIXELS` after it is resized.

    An image that would be cut into tiles is one tile.

    Raises:
        InvalidRequestError: the model's images are always larger.
    """
    if (least := spec.least_pixels) > SMALL_PIXELS:
        raise InvalidRequestError(
            f"{name}: detail 'low' means at most {SMALL_PIXELS} pixels, and this model's images"
            f" have at least {least}; leave detail out",
            param=name.partition(":")[0],
            code="unsupported_parameter",
        )
    if spec.tiles is not None:
        whole = msgspec.structs.replace(spec.tiles, is_split=False)
        return msgspec.structs.replace(spec, tiles=whole)
    return spec.limited(SMALL_PIXELS)
