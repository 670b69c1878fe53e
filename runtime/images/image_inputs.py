"""Checks the images of a prompt against the limits and prepares them for the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ostinato.conf.images.images_schema import ImagesConfig
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_sources import (
    ImageSource,
    data_url_bytes,
    fetch_target,
    is_data_url,
)
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import PromptImage

__all__ = (
    "SMALL_PIXELS",
    "check_images",
    "image_name",
    "max_image_bytes",
    "preload_images",
    "prepare_images",
    "urls_to_fetch",
)

SMALL_PIXELS = 512 * 512  # the most pixels of an image with `detail` low


def preload_images() -> None:
    """Import what `prepare_images` needs, so that forks of this process share it."""
    from ostinato.runtime.images import prepare_image  # noqa: F401 - it has NumPy and Pillow


def image_name(param: str, index: int) -> str:
    """The name of an image in errors.

    Args:
        param: the field that has the images.
        index: the number of the image in the request, from 0.
    """
    return f"{param}: image {index + 1}"


def max_image_bytes(config: ImagesConfig) -> int:
    """The most bytes of one encoded image."""
    return int(config.max_mib * (1 << 20))


def check_images(
    sources: Sequence[ImageSource], model: ServedModel, config: ImagesConfig, *, param: str
) -> None:
    """Check that a request may have these images. Nothing is decoded.

    Raises:
        InvalidRequestError: the model takes no images, there are too many, or an image cannot be
            made as small as the request asks.
    """
    if not sources:
        return
    if model.images is None:
        raise InvalidRequestError(
            f"{param}: {model.name} takes no images; send text only",
            param=param,
            code="unsupported_parameter",
        )
    if len(sources) > config.max_per_request:
        raise InvalidRequestError(
            f"{param} has {len(sources)} images, and images.max_per_request allows"
            f" {config.max_per_request}; send fewer",
            param=param,
            code="too_many_images",
        )
    for index, source in enumerate(sources):
        if source.is_small:
            _small(model.images, image_name(param, index))


def urls_to_fetch(
    sources: Sequence[ImageSource], config: ImagesConfig, *, param: str
) -> dict[str, str]:
    """The URLs that must be fetched -> the name of the first image with this URL.

    Raises:
        InvalidRequestError: a URL is not valid, or its host is not in `images.domains`.
    """
    found: dict[str, str] = {}
    for index, source in enumerate(sources):
        if source.pil is None and not is_data_url(source.url):
            name = image_name(param, index)
            fetch_target(source.url, config.domains, name)
            found.setdefault(source.url, name)
    return found


def prepare_images(
    sources: Sequence[ImageSource],
    model: ServedModel,
    config: ImagesConfig,
    *,
    param: str,
    fetched: Mapping[str, bytes],
    begin: Callable[[str], None] = lambda name: None,
) -> list[PromptImage]:
    """Decode and resize the images of one prompt. Pillow is imported with the first image.

    Args:
        sources: the images, which `check_images` has checked.
        model: the model.
        config: the limits.
        param: the field that has the images, for errors.
        fetched: URL -> the bytes that were fetched, for all URLs of `urls_to_fetch`.
        begin: called before each image with its name.

    Raises:
        InvalidRequestError: an image is not valid or too large, or the images together have more
            embeddings than a request can have.
    """
    if not sources:
        return []
    assert model.images is not None, "checked by check_images"
    from ostinato.runtime.images.prepare_image import ImageLimits, prepare_image, prepare_pil

    limits = ImageLimits(max_bytes=max_image_bytes(config), max_pixels=config.max_pixels)
    images: list[PromptImage] = []
    num_tokens = 0
    for index, source in enumerate(sources):
        name = image_name(param, index)
        begin(name)
        spec = _small(model.images, name) if source.is_small else model.images
        try:
            if source.pil is not None:
                image = prepare_pil(source.pil, spec, limits, name)
            else:
                data = (
                    data_url_bytes(source.url, limits.max_bytes, name)
                    if is_data_url(source.url)
                    else fetched[source.url]
                )
                image = prepare_image(data, spec, limits, name)
        except InvalidRequestError as error:
            code = error.code or "invalid_image"
            raise InvalidRequestError(str(error), param=param, code=code) from error
        num_tokens += image.num_tokens
        if num_tokens > model.image_cache_tokens:
            raise InvalidRequestError(
                f"{param}: the first {index + 1} images have {num_tokens} embeddings, and a"
                f" request can have {model.image_cache_tokens} (images.cache_tokens); send fewer"
                " or smaller images",
                param=param,
                code="too_many_images",
            )
        images.append(image)
    return images


def _small(spec: ImageSpec, name: str) -> ImageSpec:
    """The spec for an image with `detail` low: at most `SMALL_PIXELS` after it is resized.

    Raises:
        InvalidRequestError: the model's images are always larger.
    """
    is_fixed = spec.sizing is ImageSizing.fixed
    least = math.prod(spec.fixed_size) if is_fixed else spec.min_pixels
    if least > SMALL_PIXELS:
        raise InvalidRequestError(
            f"{name}: detail 'low' means at most {SMALL_PIXELS} pixels, and this model's images"
            f" have at least {least}; leave detail out",
            param=name.partition(":")[0],
            code="unsupported_parameter",
        )
    if is_fixed:
        return spec
    return msgspec.structs.replace(spec, max_pixels=min(spec.max_pixels, SMALL_PIXELS))
